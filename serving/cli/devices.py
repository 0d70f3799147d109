"""`--device` and what rows may take of it: flags of every command that holds rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from serving.cli.options import FiniteRange

if TYPE_CHECKING:
    from shard_node.cuda.card_set import CardOptions, CardSet

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

DEFAULT_PINNED_GB = 16.0
"""The engine's default, repeated because importing the engine would make `--help` slow; a test compares them."""

DEVICE_FLAGS = ("device", "card_memory_gb", "pinned_memory_gb", "hot_gb", "peer_access")
"""Names of the options, for commands that pass them on or allow them only with rows."""


def device_options(function: Decorated) -> Decorated:
    """`--device`, `--card-memory-gb`, `--pinned-memory-gb`, `--hot-gb`, `--peer-access`."""
    function = click.option(
        "--peer-access",
        type=click.Choice(["auto", "required"]),
        default="auto",
        show_default=True,
        help="With GPUs: required refuses to start unless every card reads the memory of every other. auto goes on "
        "without: then rows are on all cards, or in pinned host memory.",
    )(function)
    function = click.option(
        "--hot-gb",
        type=FiniteRange(min=0),
        metavar="GB",
        help="With GPUs: memory of each card for copies of the hottest rows, which every card has. Default: what is "
        "left when all rows are on cards, else a sixteenth.",
    )(function)
    function = click.option(
        "--pinned-memory-gb",
        type=FiniteRange(min=0),
        default=DEFAULT_PINNED_GB,
        show_default=True,
        metavar="GB",
        help="With GPUs: host memory for rows that no card has room for, which cards read in place. Rows beyond it "
        "stay in the mapped files.",
    )(function)
    function = click.option(
        "--card-memory-gb",
        type=FiniteRange(min=0, min_open=True),
        metavar="GB",
        help="With GPUs: memory of each card for the rows of one version, in 10^9 bytes. Default: half of what is "
        "free at the start, so that two versions fit side by side.",
    )(function)
    return device_option("auto")(function)


def device_option(default: str) -> Callable[[Decorated], Decorated]:
    """`--device`."""
    return click.option(
        "--device",
        default=default,
        show_default=True,
        metavar="DEVICE",
        help="Where rows lie and are pooled: cpu; cuda (one GPU for each card); cuda:0 or cuda:0,1 (these, with "
        "several logical cards on each if there are more cards); or auto: GPUs if CuPy and one for each card are here.",
    )


def device_arguments(options: Mapping[str, Any]) -> list[str]:
    """The flags that give a child process the same devices. Raises DeviceChoiceError before any child is started."""
    from shard_node.cuda.device_choice import DeviceChoice

    DeviceChoice.parse(options["device"])
    told = [(name, options[name]) for name in DEVICE_FLAGS if options[name] is not None]
    return [text for name, value in told for text in (f"--{name.replace('_', '-')}", str(value))]


def card_options(options: Mapping[str, Any]) -> CardOptions:
    """What one version may take of the cards."""
    from shard_node.cuda.card_set import CardOptions

    return CardOptions(
        card_memory_gb=options["card_memory_gb"],
        pinned_memory_gb=options["pinned_memory_gb"],
        hot_gb=options["hot_gb"],
        require_peer_access=options["peer_access"] == "required",
    )


def open_card_set(options: Mapping[str, Any]) -> CardSet | None:
    """The cards that the flags choose, opened; None for the CPU. Raises as `CardSet.open`."""
    from shard_node.cuda.card_set import CardSet

    return CardSet.open(options["device"], options["cards"], card_options(options))


def num_replicas(asked: int | None, card_set: CardSet | None, *, may_wait: bool = True) -> int:
    """Ranking replicas: as asked; else one for each card; else none, if no row has to be waited for; else one.

    Args:
        asked: by `--ranking-replicas`.
        card_set: where the rows of this process are, if on cards.
        may_wait: whether rows may have to be waited for, from a shard node or from a disk.

    Raises:
        click.UsageError: for 0 where rows may have to be waited for.
    """
    if asked == 0 and (may_wait or card_set is not None):
        raise click.UsageError("--ranking-replicas 0 is only for rows that are all in this process's RAM.")
    if asked is not None:
        return asked
    if card_set is not None:
        return len(card_set.cards.cards)
    return 1 if may_wait else 0
