"""The status of rollouts on a terminal: once, on and on, or line by line until one ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime

import click
from rich import box
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from loader.errors import RegistryUnavailableError, RolloutError
from loader.registry.fleet import COORDINATOR_LOCK, ROLLOUTS, FleetRegistry
from loader.rollout.guards import GuardReport, VersionNumbers
from loader.rollout.plan import Rollout, read_rollout
from loader.rollout.requests import NodeStatus, RolloutStatus, VersionStatus, read_status
from serving.cli.output import human_bytes, human_time, print_json, stdout_console

SHOWN_EVENTS = 8
SHOWN_LAGS = 6
_STEP_STYLES = {"done": "green", "running": "bold yellow", "pending": "dim"}
_STEP_MARKS = {"done": "+", "running": ">", "pending": "-"}
_STATE_STYLES = {"ready": "green", "refused": "bold red", "staging": "yellow", "waiting": "yellow", "draining": "cyan"}
POLL_S = 0.2
REMIND_S = 10.0
"""How long a rollout may stand still before it is told what it waits for, again and again."""

Sleep = Callable[[float], Awaitable[None]]


async def read_statuses(fleet: FleetRegistry, model: str | None) -> tuple[RolloutStatus, ...]:
    """Read the status of one model, or of all. Raises RegistryError."""
    if model is not None:
        return (await read_status(fleet, model),)
    rolled = {key.removeprefix(ROLLOUTS) for key in await fleet.registry.entries(ROLLOUTS)}
    return tuple([await read_status(fleet, one) for one in sorted(rolled | set(await fleet.wanted()))])


async def print_status(fleet: FleetRegistry, model: str | None, *, as_json: bool) -> None:
    """Print it once. Raises RegistryError."""
    found = await read_statuses(fleet, model)
    if as_json:
        print_json(found[0] if model is not None else {"rollouts": [one.model_dump(mode="json") for one in found]})
        return
    stdout_console().print(await _drawn(fleet, found))


async def watch_status(fleet: FleetRegistry, model: str | None, sleep: Sleep = asyncio.sleep) -> None:
    """Show it until it is cancelled; a registry that does not answer is waited for.

    A terminal is drawn anew. Into a pipe or a file goes what has changed, each time that a step begins or ends.
    """
    console = stdout_console()
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(await _looked(fleet, model), refresh=True)
                await sleep(POLL_S)
    shown: object = None
    while True:
        try:
            found = await read_statuses(fleet, model)
            now: object = [(one.model, one.live, one.rollout_id, one.state, one.step, one.reason) for one in found]
            drawn = await _drawn(fleet, found)
        except RegistryUnavailableError as error:
            now, drawn = "waiting", _waiting(error)
        if now != shown:
            shown = now
            console.print(drawn)
        await sleep(POLL_S)


async def _looked(fleet: FleetRegistry, model: str | None) -> Group:
    try:
        return await _drawn(fleet, await read_statuses(fleet, model))
    except RegistryUnavailableError as error:
        return _waiting(error)


def _waiting(error: RegistryUnavailableError) -> Group:
    return Group(Text(f"waiting: {error}", style="red"))


async def follow_rollout(fleet: FleetRegistry, begun: Rollout, sleep: Sleep = asyncio.sleep) -> Rollout:
    """Tell what happens in a rollout, line by line, until it has ended.

    Returns:
        Its last record; how it ended has been printed, to stderr if it is not done.

    Raises:
        RolloutError: another one has taken its place in the registry before its end was seen.
        RegistryRecordError: a record can't be read.
    """
    teller = _Teller(begun)
    while True:
        try:
            on_record = await read_rollout(fleet, begun.model)
            if on_record is not None:
                if on_record.rollout.rollout_id != begun.rollout_id:
                    raise RolloutError(f"{begun.model}: another rollout followed before the end of this one was seen")
                teller.tell(on_record.rollout)
                if not on_record.rollout.active:
                    wanted = await fleet.wanted_model(begun.model)
                    _tell_end(on_record.rollout, None if wanted is None else wanted.live)
                    return on_record.rollout
                if teller.stands_still():
                    await _remind(fleet, begun.model)
        except RegistryUnavailableError as error:
            teller.tell_once(f"waiting: {error}")
        await sleep(POLL_S)


class _Teller:
    """Prints each event of a rollout once."""

    def __init__(self, begun: Rollout) -> None:
        self._told = set(begun.events)
        self._last = ""
        self._moved = time.monotonic()

    def tell(self, rollout: Rollout) -> None:
        for event in rollout.events:
            if event not in self._told:
                self._told.add(event)
                self.tell_once(event_line(event.at, event.step, event.text))

    def tell_once(self, line: str) -> None:
        if line != self._last:
            self._last = line
            self._moved = time.monotonic()
            click.echo(line)

    def stands_still(self) -> bool:
        """Whether nothing was told for a while; begins to count anew if so."""
        if time.monotonic() - self._moved < REMIND_S:
            return False
        self._moved = time.monotonic()
        return True


async def _remind(fleet: FleetRegistry, model: str) -> None:
    status = await read_status(fleet, model)
    click.echo(headline(status, time.time()))
    if await fleet.registry.holder(COORDINATOR_LOCK) is None:
        click.echo("no coordinator is running, so nothing moves: start `shardrank coordinator`")
    for lag in status.waiting_for:
        click.echo(f"  waiting for {lag}")


def _tell_end(rollout: Rollout, live: int | None) -> None:
    lasted = human_time(rollout.events[-1].at - rollout.started_at) if rollout.events else ""
    if rollout.state == "done":
        click.echo(f"{rollout.model}: version {rollout.to_version} is live, after {lasted}")
        return
    left = "no version is live" if live is None else f"version {live} is live"
    ended = rollout.state.replace("_", " ")
    click.echo(f"{rollout.model}: version {rollout.to_version} was {ended}: {rollout.reason}; {left}", err=True)


async def _drawn(fleet: FleetRegistry, found: tuple[RolloutStatus, ...]) -> Group:
    if not found:
        return Group(Text("nothing was rolled out yet"))
    has_coordinator = await fleet.registry.holder(COORDINATOR_LOCK) is not None
    return Group(*(render(status, time.time(), has_coordinator) for status in found))


def render(status: RolloutStatus, now: float, has_coordinator: bool) -> RenderableType:
    """Draw one model's status.

    Args:
        status: what is shown.
        now: seconds since the epoch.
        has_coordinator: whether anybody carries rollouts out.
    """
    parts: list[RenderableType] = [Text(headline(status, now), style="bold")]
    if status.state is not None:
        parts.append(_steps(status))
    if status.reason:
        parts.append(Text(f"reason: {status.reason}", style="red"))
    if status.state in ("running", "undoing") and not has_coordinator:
        parts.append(Text("no coordinator is running, so nothing moves: start `shardrank coordinator`", style="red"))
    parts.extend(Text(f"waiting for {lag}", style="yellow") for lag in _shortened(status.waiting_for))
    if status.nodes:
        parts.append(_nodes(status))
    if status.guards is not None:
        parts.append(_guards(status.guards))
    parts.extend(Text(event_line(event.at, event.step, event.text)) for event in status.events[-SHOWN_EVENTS:])
    return Group(*parts, Text())


def headline(status: RolloutStatus, now: float) -> str:
    """Write `films: version 3 is live; rollout of 4 in place of 3 (beside): running for 20 s, step flip (5 of 7)`."""
    live = "no version is live" if status.live is None else f"version {status.live} is live"
    if status.state is None:
        return f"{status.model}: {live}; there was no rollout yet"
    details = [str(status.strategy)]
    if status.canary_share is not None:
        details.append(f"canary {100 * status.canary_share:g}%")
    if status.bake_s:
        details.append(f"bake {human_time(status.bake_s)}")
    origin = "as the first one" if status.from_version is None else f"in place of {status.from_version}"
    told = f"{status.model}: {live}; rollout of {status.to_version} {origin} ({', '.join(details)})"
    if status.state not in ("running", "undoing"):
        return f"{told}: {status.state.replace('_', ' ')}"
    lasts = human_time(now - (status.started_at or now))
    here = next((number for number, step in enumerate(status.steps, 1) if step.state == "running"), len(status.steps))
    return f"{told}: {status.state} for {lasts}, step {status.step} ({here} of {len(status.steps)})"


def event_line(at: float, step: str, text: str) -> str:
    """Write `12:30:05 flip: …`, in UTC."""
    return f"{datetime.fromtimestamp(at, tz=UTC):%H:%M:%S} {step}: {text}"


def _steps(status: RolloutStatus) -> Text:
    line = Text("steps: ")
    for step in status.steps:
        line.append(f"{_STEP_MARKS[step.state]}{step.name}  ", style=_STEP_STYLES[step.state])
    return line


def _shortened(lags: tuple[str, ...]) -> Iterable[str]:
    yield from lags[:SHOWN_LAGS]
    if len(lags) > SHOWN_LAGS:
        yield f"{len(lags) - SHOWN_LAGS} more"


def _nodes(status: RolloutStatus) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("node", "shard", "version", "state", "staged", "deltas", "leases", "rows", "golden", "reason"):
        right = name in ("version", "staged", "deltas", "leases", "rows", "golden")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for node in sorted(status.nodes, key=lambda one: (one.kind, one.shard_index or 0, one.node_id)):
        name = f"{node.node_id} (ends)" if node.draining else node.node_id
        shard = "serving" if node.shard_index is None else str(node.shard_index)
        if not node.versions:
            table.add_row(name, shard, "-")
        for version in node.versions:
            table.add_row(name, shard, str(version.version), *_version_cells(node, version))
    return table


def _version_cells(node: NodeStatus, version: VersionStatus) -> tuple[RenderableType, ...]:
    state = f"{version.state}, live" if node.live == version.version else version.state
    golden = "" if version.golden_difference is None else f"{version.golden_difference:.2g}"
    return (
        Text(state, style=_STATE_STYLES[version.state]),
        f"{100 * version.progress:.0f}%" if version.state == "staging" else "",
        str(version.delta_sequence or ""),
        str(version.leases or ""),
        human_bytes(version.memory_bytes) if version.memory_bytes else "",
        golden,
        Text(version.reason),
    )


def _guards(verdict: GuardReport) -> Table:
    outcome = "breached" if verdict.breached else "kept" if verdict.compared else "not compared yet"
    title = f"guards: {outcome}" + (f", {verdict.reason}" if verdict.reason else "")
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    for name in ("since the bake began", "requests", "errors", "p99 ms", "mean score"):
        table.add_column(name, justify="left" if name.startswith("since") else "right")
    table.add_row("live version", *_numbers(verdict.live))
    table.add_row("new version", *_numbers(verdict.new))
    return table


def _numbers(numbers: VersionNumbers) -> tuple[str, ...]:
    share = "-" if numbers.error_rate is None else f"{100 * numbers.error_rate:.2f}%"
    p99 = "-" if numbers.p99_ms is None else f"{numbers.p99_ms:.2f}"
    mean = "-" if numbers.mean_score is None else f"{numbers.mean_score:.4f}"
    return str(numbers.requests), share, p99, mean
