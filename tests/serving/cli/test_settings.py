"""Options become configs, limits and cards, and children are given the same."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import click
import pytest

from serving.cli.options import device_options
from serving.cli.serve import serve, shard_node
from serving.cli.settings import (
    arguments,
    config_of,
    device_arguments,
    node_identity,
    num_replicas,
    open_card_set,
    read_limits,
    serving_arguments,
)
from serving.fleet.local_fleet import FleetConfig
from serving.fleet.membership import Membership
from serving.limits import RequestLimits
from serving.shard_server import serve_shard
from shard_node.cuda.card_engine import CardEngine
from shard_node.cuda.card_set import CardOptions, CardSet
from shard_node.node import ShardNode
from shardrank_testing.command_line import ANY_PORTS, shardrank
from shardrank_testing.emulated_cards import EmulatedCards
from shardrank_testing.serving_api import MODEL, ApiModel


def given(path: Path | None, *limits: tuple[str, str]) -> dict[str, object]:
    return {"limits_file": path, "limit": limits}


def test_without_flags_the_limits_are_the_defaults_and_children_are_told_none() -> None:
    assert read_limits(given(None)) == RequestLimits()
    assert serving_arguments(given(None)) == []


@pytest.mark.parametrize("suffix", [".json", ".toml"])
def test_a_flag_overrides_the_file_and_children_are_told_both(tmp_path: Path, suffix: str) -> None:
    values = {"max_candidates": 500, "receive_timeout_s": 2.5}
    text = json.dumps(values) if suffix == ".json" else "".join(f"{name} = {value}\n" for name, value in values.items())
    path = tmp_path / f"limits{suffix}"
    path.write_text(text)
    options = given(path, ("max_candidates", "20"))
    limits = read_limits(options)
    assert (limits.max_candidates, limits.receive_timeout_s) == (20, 2.5)
    assert sorted(serving_arguments(options)) == ["--limit=max_candidates=20", "--limit=receive_timeout_s=2.5"]


def test_limits_of_addresses_are_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    options = given(None, ("penalty_s", "3"), ("max_candidates", "20")) | {"trusted_proxies": ("10.0.0.0/8",)}
    assert read_limits(options) == RequestLimits(max_candidates=20)
    assert "penalty_s, --trusted-proxy: ignored" in caplog.text


@pytest.mark.parametrize(
    ("assignment", "problem"),
    [
        (("lunch", "1"), r"lunch: unknown key 'lunch'; allowed are \['max_body_bytes', 'max_buffered_bytes', "),
        (("max_candidates", "0"), "max_candidates: Input should be greater than or equal to 1"),
        (("max_candidates", "many"), "max_candidates: Input should be a valid integer"),
    ],
)
def test_a_limit_that_is_unknown_or_out_of_range_is_named(assignment: tuple[str, str], problem: str) -> None:
    with pytest.raises(click.UsageError, match=problem):
        read_limits(given(None, assignment))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "expected an object of limits by name"),
        ("{", "Expecting property name"),
        (" " * (2**20 + 1), "more than 1048576 bytes"),
    ],
)
def test_a_file_that_is_none_of_limits_is_refused_by_name(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "limits.json").write_text(text)
    with pytest.raises(click.UsageError, match=f"limits.json: {problem}"):
        read_limits(given(tmp_path / "limits.json"))


def test_a_config_takes_the_options_that_are_its_fields_and_names_what_is_out_of_range() -> None:
    options = {"store": Path("models"), "shards": 3, "host": "::1", "registry": None, "threads": 7}
    config = config_of(FleetConfig, options, models=("films",), shards=4)
    assert (config.store, config.shards, config.host, config.registry) == (Path("models"), 4, "::1", None)
    with pytest.raises(click.UsageError, match=r"up: shards: .* less than or equal to 64"):
        config_of(FleetConfig, options | {"shards": 65}, "up: ", models=("films",))


def test_a_child_is_given_each_flag_as_often_as_it_was_given() -> None:
    options = {"models": ("a", "b"), "max_staleness": (("a", "3"),), "hot_gb": 0.5, "advertise": None}
    options["tokens"] = Path("t")
    assert arguments(options, [*options, "not an option of the command"]) == [
        *("--model", "a", "--model", "b", "--max-staleness", "a=3", "--hot-gb", "0.5"),
        *("--tokens", str(Path("t").absolute())),
    ]


FLAGS = ["--device", "cuda:0,1", "--card-memory-gb", "0.5", "--pinned-memory-gb", "3", "--hot-gb", "0.25"]
FLAGS += ["--peer-access", "required"]
OPTIONS = CardOptions(card_memory_gb=0.5, pinned_memory_gb=3, hot_gb=0.25, require_peer_access=True)


@click.command()
@device_options
def rows(**options: object) -> None:
    """Holds rows."""


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Whatever device is named, it is emulated cards; tells which were asked for."""
    asked: list[tuple[str, int]] = []

    def open_cards(choice: object, num_cards: int) -> EmulatedCards:
        asked.append((str(choice), num_cards))
        return EmulatedCards(num_cards)

    monkeypatch.setattr("shard_node.cuda.card_set.open_cards", open_cards)
    return asked


def test_a_child_is_given_the_same_cards() -> None:
    given = rows.make_context("rows", list(FLAGS)).params
    told = rows.make_context("rows", device_arguments(given)).params
    assert told == given


@pytest.mark.parametrize(
    ("flag", "num_cards", "may_block", "expected"),
    [
        (None, 4, False, 4), (None, 4, True, 4), (3, 4, False, 3), (3, 4, True, 3),
        (3, None, False, 3), (3, None, True, 3), (None, None, False, 0), (0, None, False, 0), (None, None, True, 1),
        (0, None, True, None), (0, 1, False, None),
    ],
)  # fmt: skip
def test_how_many_replicas_rank(flag: int | None, num_cards: int | None, may_block: bool, expected: int | None) -> None:
    """One for each card; without cards the event loop ranks, unless a row may block it."""
    card_set = None if num_cards is None else CardSet(EmulatedCards(num_cards))
    if expected is None:
        with pytest.raises(click.UsageError, match="--ranking-replicas 0 is only for rows in this process's RAM"):
            num_replicas(flag, card_set, may_block=may_block)
    else:
        assert num_replicas(flag, card_set, may_block=may_block) == expected


def test_cuda_without_cupy_ends_the_command_with_what_is_missing(
    api_model: ApiModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "shard_node.cuda.cupy_cards", raising=False)
    monkeypatch.setitem(sys.modules, "cupy", None)
    for command in (("serve", "--snapshot", api_model.path), ("demo", "--once", "--local", *ANY_PORTS)):
        assert "pip install 'shardrank[cuda]'" in shardrank(*command, "--device", "cuda", code=1).output
    assert open_card_set(serve.make_context("serve", ["--snapshot", "x"]).params) is None


def test_a_shard_node_has_its_rows_on_the_cards_that_its_flags_name(
    api_model: ApiModel, emulated: list[tuple[str, int]], folder: Path
) -> None:
    given = ["--snapshot", str(api_model.path), "--shard", "0/1", "--listen", f"unix:{folder}/x", *FLAGS]
    options = shard_node.make_context("shard-node", given).params
    node, card_set = ShardNode(node_identity(options, 0, 1)), open_card_set(options)

    async def program() -> None:
        membership = Membership.of(options, in_fleet=False)
        running = asyncio.create_task(serve_shard(options, membership, node, card_set, None))
        while not node.generations.models():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert isinstance(node.generations.payload(MODEL, 1).engine, CardEngine)
        assert {use.tier for use in node.info().memory} != {"ram"}
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(program())
    assert emulated == [("cuda:0,1", 1)]
    assert card_set is not None
    assert card_set.options == OPTIONS
    node.close()
