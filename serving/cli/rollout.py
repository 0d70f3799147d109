"""`shardrank publish`, `versions`, `rollout` and `rollback`: which version of a model a fleet serves."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from serving.cli.group import GroupWithExamples, WithExamples
from serving.cli.options import (
    Assignment,
    Duration,
    Share,
    count_option,
    fleet_options,
    folder_option,
    follow_option,
    hash_threads_option,
    json_flag,
    opened_registry,
    registry_option,
    registry_url,
    validated,
    with_registry,
)
from serving.cli.output import human_bytes, print_json, print_table, progress_bars

if TYPE_CHECKING:
    from loader.registry.fleet import FleetRegistry, PublishedVersion, WantedModel
    from loader.rollout.plan import Rollout
    from loader.snapshot.publishing import Publication, Retained

DEFAULT_CANARY_BAKE_S = 60.0


@click.command(cls=WithExamples)
@click.argument("snapshot_folder", type=click.Path(path_type=Path, file_okay=False, exists=True))
@folder_option("--store", "Where the fleet's processes find snapshots; default: the store in which the folder lies.")
@registry_option
@count_option(
    "--retain",
    "Keep the K highest published versions of the model and delete the others from the store, but never one that "
    "is wanted, rolled out, or the last rollout's origin. Default: keep all.",
    metavar="K",
)
@hash_threads_option
@json_flag("what was published")
def publish(
    snapshot_folder: Path, store: Path | None, registry: str | None, retain: int | None, threads: int, as_json: bool
) -> None:
    """Check a snapshot in full, copy it into the store, and put it on record.

    Nothing is rolled out by this: see `shardrank rollout start`. Without --registry it is the one in the store.
    May be run again: a copy that was interrupted goes on, and what is published already stays as it is.

    Examples:
      shardrank publish models/films/3
      shardrank publish /training/out/films/3 --store models --retain 5
      shardrank publish /training/out/films/3 --store models --registry redis://10.0.0.9:6379/0
    """
    from loader.snapshot import publishing

    folder = snapshot_folder.resolve()
    where = folder.parent.parent if store is None else store

    async def work(fleet: FleetRegistry) -> tuple[Publication, Retained | None]:
        done = await publishing.publish(fleet, folder, where, clock=time.time, threads=threads, progress=bars)
        if retain is None:
            return done, None
        return done, await publishing.retain(fleet, where, done.record.model, retain)

    with progress_bars() as bars:
        published, retained = with_registry(registry_url(registry, where), work)
    record = published.record
    if as_json:
        done = {"folder": str(published.folder), "copied": published.copied, "is_new": published.is_new}
        kept, deleted = (None, None) if retained is None else (retained.kept, retained.dropped)
        print_json(record.model_dump(mode="json") | done | {"kept": kept, "deleted": deleted})
        return
    how = "copied to" if published.copied else "lies in"
    news = "is published" if published.is_new else "was published before"
    click.echo(f"{record.model} version {record.version} {news}; {human_bytes(record.rows_bytes)} of rows")
    click.echo(f"{how} {published.folder}, identity {record.identity}")
    if retained is not None:
        click.echo(f"kept: {_numbers(retained.kept)}; deleted: {_numbers(retained.dropped)}")


def _numbers(versions: tuple[int, ...]) -> str:
    return ", ".join(map(str, versions)) or "none"


@click.command(cls=WithExamples)
@click.argument("model", required=False)
@fleet_options
@json_flag("the list")
def versions(model: str | None, registry: str | None, store: Path | None, as_json: bool) -> None:
    """List the versions that are published, and what they are used for.

    Examples:
      shardrank versions --store models
      shardrank versions films --registry redis://10.0.0.9:6379/0 --json
    """
    found = with_registry(registry_url(registry, store), lambda fleet: _used_versions(fleet, model))
    if as_json:
        used = [one.model_dump(mode="json") | {"uses": uses, "nodes": nodes} for one, uses, nodes in found]
        print_json({"versions": used})
        return
    rows = [
        (one.model, one.version, ", ".join(uses) or "-", _date(one.published_at), human_bytes(one.rows_bytes),
         _lineage(one.version, one.delta_base, one.last_delta), nodes, one.identity[:12])
        for one, uses, nodes in found
    ]  # fmt: skip
    if not rows:
        click.echo("no version is published" if model is None else f"no version of {model!r} is published")
        return
    columns = ("model", "#version", "use", "published", "#rows", "deltas", "#nodes ready", "identity")
    print_table("Versions", columns, rows)


async def _used_versions(
    fleet: FleetRegistry, model: str | None
) -> list[tuple[PublishedVersion, tuple[str, ...], int]]:
    """The published versions of one model, or of all; each with its uses and the number of nodes that have it ready."""
    published = await fleet.versions(model)
    wanted, nodes = await fleet.wanted(), await fleet.nodes()
    found: list[tuple[PublishedVersion, tuple[str, ...], int]] = []
    for record in sorted(published, key=lambda one: (one.model, one.version)):
        reports = [node.report(record.model, record.version) for node in nodes]
        ready = sum(report is not None and report.state == "ready" for report in reports)
        found.append((record, _uses(record.version, wanted.get(record.model)), ready))
    return found


def _uses(version: int, wanted: WantedModel | None) -> tuple[str, ...]:
    if wanted is None:
        return ()
    uses: list[str] = []
    if version == wanted.live:
        uses.append("live")
    elif version in wanted.hold or any(version in held for held in wanted.node_hold.values()):
        uses.append("staged")
    if wanted.canary is not None and version == wanted.canary.version:
        uses.append(f"canary {wanted.canary.share:.3g}")
    return tuple(uses)


def _date(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, tz=UTC):%Y-%m-%d %H:%M:%S} UTC"


def _lineage(version: int, delta_base: int, last_delta: int) -> str:
    origin = "own stream" if delta_base == version else f"stream of {delta_base}"
    return f"{origin}, has {last_delta}" if last_delta else origin


@click.group(cls=GroupWithExamples)
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
@follow_option
@fleet_options
@click.pass_context
def start(
    ctx: click.Context,
    model: str,
    version: int,
    canary: float | None,
    bake: float | None,
    strategy: Literal["beside", "by-replica"],
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
    from loader.rollout.guards import GuardLimits
    from loader.rollout.requests import start_rollout
    from serving.cli.rollout_view import follow_rollout

    limits = validated(GuardLimits, dict(guard), "--guard: ")
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
    from serving.cli.rollout_view import print_status, watch_status
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

    ended = with_registry(registry_url(registry, store), lambda fleet: abort_rollout(fleet, model, reason))
    click.echo(f"{model}: version {ended.to_version} is being taken back; see: shardrank rollout status {model}")


@click.command(cls=WithExamples)
@click.argument("model")
@follow_option
@fleet_options
@click.pass_context
def rollback(ctx: click.Context, model: str, follow: bool, registry: str | None, store: Path | None) -> None:
    """Return to the version that was live before the last rollout.

    While a rollout runs, this is `shardrank rollout abort`. After one, the earlier version is rolled out again: staged,
    checked and flipped to like any other, so no answer fails. Its strategy is that of the last rollout; for another one
    use `shardrank rollout start`.

    Examples:
      shardrank rollback films --store models --follow
      shardrank rollback films --registry redis://10.0.0.9:6379/0
    """
    from loader.rollout.requests import roll_back
    from serving.cli.rollout_view import follow_rollout

    async def work(fleet: FleetRegistry) -> bool:
        begun = await roll_back(fleet, model, clock=time.time, rollout_id=secrets.token_hex(16))
        back = begun.to_version if begun.state == "running" else begun.from_version
        click.echo(f"{model}: going back to {'no version' if back is None else f'version {back}'}")
        if not follow:
            click.echo(f"see: shardrank rollout status {model} --watch")
            return True
        # One that was running is back once it is aborted; a rollout of the earlier version must come to its end.
        wished = "done" if begun.state == "running" else "aborted"
        return (await follow_rollout(fleet, begun)).state == wished

    if not with_registry(registry_url(registry, store), work):
        ctx.exit(1)
