"""`shardrank rollout`: start, watch and abort the replacement of a live version by another one."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from serving.cli.amounts import Duration, Share
from serving.cli.examples import WithExamples
from serving.cli.options import Assignment, fleet_options, json_flag
from serving.cli.registries import opened_registry, registry_url, with_registry

if TYPE_CHECKING:
    from loader.registry.typed import FleetRegistry
    from loader.rollout.guards import GuardLimits
    from loader.rollout.record import Rollout

Strategy = Literal["beside", "by-replica"]
DEFAULT_CANARY_BAKE_S = 60.0


class RolloutGroup(WithExamples, click.Group):
    """Subcommands with examples."""

    command_class = WithExamples


@click.group(cls=RolloutGroup)
def rollout() -> None:
    """Replace the live version of a model without a failed or mixed answer.

    A rollout is a plan in the registry that the coordinator carries out step by step; these commands only write the
    plan and show how far it is, so they may be interrupted at any time.

    Examples:
      shardrank rollout start films 4 --canary 5% --bake 2m --follow
      shardrank rollout status --watch
      shardrank rollout abort films
    """


@rollout.command()
@click.argument("model")
@click.argument("version", type=click.IntRange(min=1))
@click.option(
    "--canary", type=Share(), metavar="SHARE", help="First send a stable share of the requests to it, such as 5%."
)
@click.option(
    "--bake",
    type=Duration(),
    metavar="TIME",
    help="How long the canary, or without one the flipped version, is held against the live one's errors, p99 and "
    "scores before the rollout goes on, such as 60s or 2m. Default: 60s with --canary, else none.",
)
@click.option(
    "--strategy",
    type=click.Choice(["beside", "by-replica"]),
    default="beside",
    show_default=True,
    help="beside: nodes hold both versions for a while. by-replica: where memory can't hold both, one replica of each "
    "shard after the other changes over; needs two replicas of each shard.",
)
@click.option(
    "--guard",
    type=Assignment("NAME=VALUE"),
    multiple=True,
    metavar="NAME=VALUE",
    help="What the bake allows: min_requests, max_error_rate_increase, max_p99_ratio, p99_slack_ms, max_score_drift. "
    "Repeatable.",
)
@click.option("--follow", is_flag=True, help="Show how far it is until it ends; exit code 1 unless it is done.")
@fleet_options
@click.pass_context
def start(
    ctx: click.Context,
    model: str,
    version: int,
    canary: float | None,
    bake: float | None,
    strategy: Strategy,
    guard: Sequence[tuple[str, str]],
    follow: bool,
    registry: str | None,
    store: Path | None,
) -> None:
    """Roll out a published version.

    It is staged beside the live one on all nodes, checked, warmed and compared with its golden scores before a single
    pointer is flipped; then the old version's requests end and its memory is freed. A version that fails a check is
    refused with the reason, one that breaches a guard is rolled back, and the old one serves throughout.

    Examples:
      shardrank rollout start films 4 --registry redis://10.0.0.9:6379/0
      shardrank rollout start films 4 --store models --canary 5% --bake 60s --guard max_p99_ratio=1.5
      shardrank rollout start films 4 --store models --strategy by-replica --follow
    """
    from loader.rollout.requests import start_rollout
    from serving.cli.rollout_watch import follow_rollout

    limits = _guard_limits(guard)
    bake_s = bake if bake is not None else DEFAULT_CANARY_BAKE_S if canary is not None else 0.0

    async def work(fleet: FleetRegistry) -> Rollout:
        started = await start_rollout(
            fleet,
            model,
            version,
            canary_share=canary,
            bake_s=bake_s,
            strategy=strategy,
            guards=limits,
            clock=time.time,
            rollout_id=secrets.token_hex(16),
        )
        click.echo(f"{model}: rolling out version {version}, {_replaced(started.from_version)}")
        return await follow_rollout(fleet, started) if follow else started

    ended = with_registry(registry_url(registry, store), work)
    if not follow:
        click.echo(f"see: shardrank rollout status {model} --watch")
    elif ended.state != "done":
        ctx.exit(1)


def _replaced(from_version: int | None) -> str:
    return "the first one" if from_version is None else f"in place of {from_version}"


def _guard_limits(assignments: Sequence[tuple[str, str]]) -> GuardLimits:
    """Raises click.UsageError, naming the guard that is unknown or out of range."""
    from pydantic import ValidationError

    from loader.manifest import schema_errors
    from loader.rollout.guards import GuardLimits

    try:
        return GuardLimits.model_validate(dict(assignments))
    except ValidationError as error:
        reasons = "; ".join(map(str, schema_errors(error, [GuardLimits])))
        raise click.UsageError(f"--guard: {reasons}") from error


@rollout.command()
@click.argument("model", required=False)
@click.option("--watch", is_flag=True, help="Keep showing it until Ctrl-C.")
@fleet_options
@json_flag("the status")
def status(model: str | None, watch: bool, registry: str | None, store: Path | None, as_json: bool) -> None:
    """Show how far the rollout of a model is, or was; of every model without MODEL.

    With the steps, what each node reports of the versions, why a version was refused, and the guards' comparison.

    Examples:
      shardrank rollout status films --store models
      shardrank rollout status --watch --registry redis://10.0.0.9:6379/0
      shardrank rollout status films --store models --json
    """
    from serving.cli.rollout_watch import print_status, watch_status
    from serving.fleet.process import StopRequestedError, run_until_signalled

    if watch and as_json:
        raise click.UsageError("--watch draws on the terminal: leave out --json, or ask again and again.")
    url = registry_url(registry, store)
    if not watch:
        with_registry(url, lambda fleet: print_status(fleet, model, as_json=as_json))
        return

    async def program() -> None:
        async with opened_registry(url) as fleet:
            await watch_status(fleet, model)

    # Ctrl-C is how to end it, so it is no error.
    with contextlib.suppress(StopRequestedError):
        run_until_signalled(program)


@rollout.command()
@click.argument("model")
@click.option("--reason", default="aborted by hand", show_default=True, metavar="TEXT", help="Kept in its record.")
@fleet_options
def abort(model: str, reason: str, registry: str | None, store: Path | None) -> None:
    """End a running rollout in the version that was live before.

    Refused once the old version is being retired: `shardrank rollback` brings it back then.

    Examples:
      shardrank rollout abort films --store models --reason "scores look wrong"
    """
    from loader.rollout.requests import abort_rollout

    async def work(fleet: FleetRegistry) -> Rollout:
        return await abort_rollout(fleet, model, reason)

    ended = with_registry(registry_url(registry, store), work)
    click.echo(f"{model}: version {ended.to_version} is being taken back; see: shardrank rollout status {model}")
