"""The status of a rollout on a terminal: steps, nodes, guards, and what happened."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from loader.rollout.guards import Verdict, VersionNumbers
from loader.rollout.status import NodeStatus, RolloutStatus, VersionStatus
from serving.cli.amounts import human_time
from serving.cli.output import human_bytes

SHOWN_EVENTS = 8
SHOWN_LAGS = 6
_STEP_STYLES = {"done": "green", "running": "bold yellow", "pending": "dim"}
_STEP_MARKS = {"done": "+", "running": ">", "pending": "-"}
_STATE_STYLES = {"ready": "green", "refused": "bold red", "staging": "yellow", "waiting": "yellow", "draining": "cyan"}


def render(status: RolloutStatus, now: float, has_coordinator: bool) -> RenderableType:
    """One model's status.

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
    """`films: version 3 is live; rollout of 4 in place of 3 (beside): running for 20 s, step flip (5 of 7)`."""
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
    """`12:30:05 flip: …`, in UTC."""
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


def _guards(verdict: Verdict) -> Table:
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
