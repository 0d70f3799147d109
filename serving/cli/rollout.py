"""`shardrank publish`, `versions`, `rollout` and `rollback`: which version of a model a fleet serves."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from serving.cli import GroupWithExamples, WithExamples
from serving.cli import options as opts
from serving.cli.output import human_time, print_document, print_json, progress_bars
from serving.cli.settings import check_store, config_of, published_folder, registry_url, with_registry
from serving.config import FrontSettings

if TYPE_CHECKING:
    from loader.registry.fleet import FleetRegistry, NodeRecord, PublishedVersion, WantedModel
    from loader.rollout.plan import Rollout
    from loader.rollout.requests import FleetState, RolloutStatus
    from loader.snapshot.publishing import Publication, Retained
    from loader.stores.cache import StorePlace

DEFAULT_CANARY_BAKE_S = 60.0
SHOWN_EVENTS = 8
SHOWN_BLOCKERS = 6
POLL_S = 0.2
REMIND_S = 10.0
"""How long a rollout may stand still before it is told what it waits for, again and again."""
NO_COORDINATOR = "no coordinator is running, so nothing moves: start `shardrank coordinator`"
_STRATEGIES = (
    "beside: nodes hold both versions for a while. by-replica: where memory can't hold both, one replica of each shard "
    "after the other changes over; needs two replicas of each shard."
)
_GUARDS = "min_requests, max_error_rate_increase, max_p99_ratio, p99_slack_ms, max_score_drift"

Sleep = Callable[[float], Awaitable[None]]


@click.command(cls=WithExamples)
@click.argument("snapshot", type=opts.store_text)
@opts.store_options("The store of the fleet's processes; default: the one in which the snapshot lies.")
@opts.registry_option
@opts.switch(
    "--next",
    "Publish it as the model's next version in the store, if its own number is not higher: of a folder that every "
    "export begins anew, and so with version 1. Run again, it stays the version that it became.",
    name="as_next",
)
@opts.option(
    "--retain K",
    "Keep the K highest published versions of the model and delete the others from the store, but never one that is "
    "wanted, rolled out, or the last rollout's origin. Default: keep all.",
    click.IntRange(1),
)
@opts.setting_option(FrontSettings, "trust_exported")
@opts.json_flag("what was published")
def publish(snapshot: str | Path, store: StorePlace | None, as_json: bool, **options: Any) -> None:
    """Check a snapshot in full, copy it into the store, and put it on record.

    SNAPSHOT is its folder or, of one that lies in a store at a URL, URL/MODEL/VERSION. Checked is what `shardrank
    verify` checks, golden scores as well; one that must not be served is not published. An exported program is run only
    with --trust-exported: else its scores are `unchecked`.
    Nothing is rolled out by this: see `shardrank rollout start`. Without --registry it is the one in the folder.
    May be run again: a copy that was interrupted goes on, and what is published already stays as it is.

    Examples:
      shardrank publish models/films/3
      shardrank publish /training/out/films/3 --store models --retain 5
      shardrank publish /training/out/films/1 --store models --next
      shardrank publish /training/out/films/3 --store models --registry redis://10.0.0.9:6379/0
      shardrank publish /training/out/films/3 --store s3://bucket/models --registry redis://10.0.0.9:6379/0
    """
    from loader.snapshot import publishing
    from serving.cli.snapshots import verify_as_server

    folder, own = published_folder(snapshot, store)
    where = own if store is None else store
    check_store(where)

    async def work(fleet: FleetRegistry) -> tuple[Publication, Retained | None]:
        checks = {"trust_exported": options["trust_exported"], "may_be_unchecked": True, "progress": bars}
        flags = {"as_next": options["as_next"], "verify": partial(verify_as_server, **checks), "progress": bars}
        done = await publishing.publish(fleet, folder, where, clock=time.time, **flags)
        retain = options["retain"]
        return done, None if retain is None else await publishing.retain(fleet, where, done.record.model, retain)

    with progress_bars() as bars:
        published, retained = with_registry(registry_url(options["registry"], where), work, may_be_new=True)
    done = {"folder": published.where, "copied": published.copied, "is_new": published.is_new}
    report = published.report
    done |= {"golden_checked": report.golden_checked, "unchecked": None if report.golden_checked else report.checks[-1]}
    kept, deleted = (None, None) if retained is None else (retained.kept, retained.dropped)
    document = published.record.model_dump(mode="json") | done | {"kept": kept, "deleted": deleted}
    (print_json if as_json else print_document)(document)


@click.command(cls=WithExamples)
@click.argument("model", required=False)
@opts.fleet_options
@opts.json_flag("the list")
def versions(model: str | None, url: str, as_json: bool) -> None:
    """List the versions that are published, and what they are used for.

    A version that is to answer is `wanted`, and `live` once a serving process answers with it. One that a fleet was
    started with and could not serve is `refused`.

    Examples:
      shardrank versions --store models
      shardrank versions films --registry redis://10.0.0.9:6379/0 --json
    """

    async def work(fleet: FleetRegistry) -> list[dict[str, Any]]:
        published, wanted, nodes = await fleet.versions(model), await fleet.wanted(), await fleet.nodes()
        return [
            record.model_dump(mode="json")
            | {"uses": _uses(record, wanted.get(record.model), nodes)}
            | {"nodes": sum(node.has(record.model, record.version, "ready") for node in nodes)}
            for record in sorted(published, key=lambda record: (record.model, record.version))
        ]

    found = with_registry(url, work, model)
    if as_json or found:
        (print_json if as_json else print_document)({"versions": found})
    else:
        click.echo("no version is published")


def _uses(record: PublishedVersion, wanted: WantedModel | None, nodes: Sequence[NodeRecord]) -> tuple[str, ...]:
    if wanted is None:
        return ()
    uses, version = list[str](), record.version
    if version == wanted.live:
        uses.append("live" if any(node.live.get(record.model) == version for node in nodes) else "wanted")
    elif version in wanted.refused:
        uses.append(f"refused: {wanted.refused[version]}")
    elif version in wanted.hold or any(version in held for held in wanted.node_hold.values()):
        uses.append("staged")
    if wanted.canary is not None and version == wanted.canary.version:
        uses.append(f"canary {wanted.canary.share:.3g}")
    return tuple(uses)


@click.group(cls=GroupWithExamples)
def rollout() -> None:
    """Replace the live version of a model without a failed or mixed answer.

    A rollout is a plan in the registry that the coordinator carries out step by step; these commands only write the
    plan and show how far it is, so they may be interrupted at any time.

    Examples:
      shardrank rollout start films 4 --canary 5% --bake 2m --follow
      shardrank rollout status
      shardrank rollout abort films
    """


@rollout.command()
@click.argument("model")
@click.argument("version", type=click.IntRange(min=1))
@opts.option("--canary SHARE", "First send a stable share of the requests to it, such as 5%.", opts.share)
@opts.duration(
    "--bake",
    "How long the canary, or without one the flipped version, is held against the live one's errors, p99 and scores "
    "before the rollout goes on, such as 60s or 2m. Default: 60s with --canary, else none.",
)
@opts.duration(
    "--bake-timeout",
    "How long a bake waits at most, from its start, until both versions have answered min_requests; then the "
    "rollout is undone. Default: 10 times --bake.",
)
@opts.choice("--strategy", ["beside", "by-replica"], _STRATEGIES)
@opts.assignments(
    "--guard NAME=VALUE", f"What the bake allows: {_GUARDS}. No bake passes before min_requests (50; 0: none)."
)
@opts.follow_option
@opts.fleet_options
def start(model: str, version: int, follow: bool, url: str, **options: Any) -> None:
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

    limits = config_of(GuardLimits, {}, "--guard: ", **options["guard"])
    canary, bake, bake_timeout_s = options["canary"], options["bake"], options["bake_timeout"]
    bake_s = bake if bake is not None else DEFAULT_CANARY_BAKE_S if canary is not None else 0.0
    if bake_timeout_s is not None and not bake_s:
        raise click.UsageError("--bake-timeout needs --bake or --canary.")
    baking = {"canary_share": canary, "bake_s": bake_s, "bake_timeout_s": bake_timeout_s, "guards": limits}

    async def begin(fleet: FleetRegistry) -> Rollout:
        started = await start_rollout(
            fleet, model, version, strategy=options["strategy"], rollout_id=secrets.token_hex(16), warn=_warn, **baking
        )
        replaced = "the first one" if started.from_version is None else f"in place of {started.from_version}"
        click.echo(f"{model}: rolling out version {version}, {replaced}")
        return started

    _begin(url, model, begin, follow=follow)


@rollout.command()
@click.argument("model", required=False)
@opts.fleet_options
@opts.json_flag("the status")
def status(model: str | None, url: str, as_json: bool) -> None:
    """Show how far the rollout of a model is, or was; of every model without MODEL.

    With the steps, what each node reports of the versions, why a version was refused, and the guards' comparison.

    Examples:
      shardrank rollout status films --store models
      shardrank rollout status --registry redis://10.0.0.9:6379/0
      shardrank rollout status films --store models --json
    """
    from loader.rollout.requests import read_fleet

    async def work(fleet: FleetRegistry) -> tuple[FleetState, dict[str, str]]:
        return await read_fleet(fleet), await fleet.strangers()

    fleet, strangers = with_registry(url, work, model)
    models = sorted(fleet.rollouts.keys() | fleet.wanted.keys()) if model is None else [model]
    statuses = [fleet.status(name) for name in models]
    for node_id, problem in strangers.items():
        click.echo(f"{node_id}: {problem}", err=as_json)
    if as_json:
        documents = [one.model_dump(mode="json") for one in statuses]
        print_json({"rollouts": documents} if model is None else documents[0])
    elif not statuses:
        click.echo("nothing was rolled out yet")
    else:
        for one in statuses:
            print_status(one, has_coordinator=fleet.coordinator is not None)


@rollout.command()
@click.argument("model")
@opts.option("--reason TEXT", "Kept in its record.", default="aborted by hand")
@opts.fleet_options
def abort(model: str, reason: str, url: str) -> None:
    """End a running rollout in the version that was live before.

    Refused once the old version is being retired, or the nodes that still have it are rolled: `shardrank rollback`
    brings it back then.

    Examples:
      shardrank rollout abort films --store models --reason "scores look wrong"
    """
    from loader.rollout.requests import abort_rollout

    ended = with_registry(url, lambda fleet: abort_rollout(fleet, model, reason), model)
    click.echo(f"{model}: version {ended.to_version} is being taken back; see: shardrank rollout status {model}")


@rollout.command("reshard")
@click.argument("shards", type=click.IntRange(1, 1024))
@opts.fleet_options
def reshard_command(shards: int, url: str) -> None:
    """Divide versions that are rolled out from now on over another number of shards.

    What is live stays on the shards that it is on. Start nodes with the new number (--shard I/SHARDS) beside the others
    and roll out a version: it is staged on them, serving processes flip to it, and no answer fails. Then the nodes of
    the old number hold nothing, and can be ended.

    Examples:
      shardrank rollout reshard 4 --registry redis://10.0.0.9:6379/0
    """
    from loader.rollout.requests import reshard

    with_registry(url, lambda fleet: reshard(fleet, shards))
    click.echo(f"the next versions are divided over {shards} shards")


@click.command(cls=WithExamples)
@click.argument("model")
@opts.follow_option
@opts.fleet_options
def rollback(model: str, follow: bool, url: str) -> None:
    """Return to the version that was live before the last rollout.

    While a rollout runs, this is `shardrank rollout abort`. After one, the earlier version is rolled out again: staged,
    checked and flipped to like any other, so no answer fails. Its strategy is that of the last rollout; for another one
    use `shardrank rollout start`.

    Examples:
      shardrank rollback films --store models --follow
      shardrank rollback films --registry redis://10.0.0.9:6379/0
    """
    from loader.rollout.requests import roll_back

    async def begin(fleet: FleetRegistry) -> Rollout:
        begun = await roll_back(fleet, model, clock=time.time, rollout_id=secrets.token_hex(16), warn=_warn)
        back = begun.to_version if begun.state == "running" else begun.from_version
        click.echo(f"{model}: going back to {'no version' if back is None else f'version {back}'}")
        return begun

    _begin(url, model, begin, follow=follow)


def _warn(warning: str) -> None:
    click.echo(f"warning: {warning}", err=True)


def _begin(url: str, model: str, begin: Callable[[FleetRegistry], Awaitable[Rollout]], *, follow: bool) -> None:
    """Begin a rollout, or undo it; exit with code 1 if it is followed and does not end as it shall."""

    async def work(fleet: FleetRegistry) -> bool:
        begun = await begin(fleet)
        if not follow:
            click.echo(f"see: shardrank rollout status {model}")
            return True
        # One that was running is back once it is aborted; a new one must come to its end.
        return (await follow_rollout(fleet, begun)).state == ("done" if begun.state == "running" else "aborted")

    if not with_registry(url, work, model):
        click.get_current_context().exit(1)


async def follow_rollout(fleet: FleetRegistry, begun: Rollout, sleep: Sleep = asyncio.sleep) -> Rollout:
    """Tell what happens in a rollout, line by line, until it has ended; returns its last record.

    Raises RolloutError if another one has taken its place in the registry before its end was seen.
    """
    from loader.errors import RegistryUnavailableError, RolloutError
    from loader.rollout.plan import read_rollout
    from loader.rollout.requests import read_fleet

    told, moved, waiting = set(begun.events), time.monotonic(), ""
    while True:
        try:
            if (record := await read_rollout(fleet, begun.model)) is not None:
                now = record.rollout
                if now.rollout_id != begun.rollout_id:
                    raise RolloutError(f"{begun.model}: another rollout followed before the end of this one was seen")
                for event in now.events:
                    if event not in told:
                        told, moved, waiting = told | {event}, time.monotonic(), ""
                        click.echo(f"{datetime.fromtimestamp(event.at, tz=UTC):%H:%M:%S} {event.step}: {event.text}")
                if not now.active:
                    _tell_end(now, await fleet.wanted_model(now.model))
                    return now
                if time.monotonic() - moved >= REMIND_S:
                    moved, state = time.monotonic(), await read_fleet(fleet)
                    _print_waiting(state.status(begun.model), has_coordinator=state.coordinator is not None)
        except RegistryUnavailableError as error:
            if (problem := str(error)) != waiting:
                waiting = problem
                click.echo(f"waiting: {problem}")
        await sleep(POLL_S)


def _print_waiting(status: RolloutStatus, *, has_coordinator: bool) -> None:
    if status.state in ("running", "undoing") and not has_coordinator:
        click.echo(NO_COORDINATOR)
    for version, reason in ({} if status.wanted is None else status.wanted.refused).items():
        if version != status.live:
            click.echo(f"  version {version} is refused: {reason}")
    for blocker in status.waiting_for[:SHOWN_BLOCKERS]:
        click.echo(f"  waiting for {blocker}")
    if (left := len(status.waiting_for) - SHOWN_BLOCKERS) > 0:
        click.echo(f"  waiting for {left} more (--json has all)")


def print_status(status: RolloutStatus, *, has_coordinator: bool) -> None:
    """Print how far a rollout is, what it waits for, and what nodes report."""
    document = status.model_dump(mode="json", exclude={"wanted", "rollout_id", "written", "waiting_for"})
    steps = {step.name: step.state for step in status.steps}
    print_document({**document, "steps": steps, "events": document["events"][-SHOWN_EVENTS:]})
    _print_waiting(status, has_coordinator=has_coordinator)


def _tell_end(ended: Rollout, wanted: WantedModel | None) -> None:
    if ended.state == "done":
        lasted = human_time(ended.events[-1].at - ended.started_at) if ended.events else ""
        click.echo(f"{ended.model}: version {ended.to_version} is live, after {lasted}")
        return
    how = ended.state.replace("_", " ")
    left = "no version" if wanted is None or wanted.live is None else f"version {wanted.live}"
    click.echo(f"{ended.model}: version {ended.to_version} was {how}: {ended.reason}; {left} is live", err=True)
