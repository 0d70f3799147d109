"""Notice what changes between two looks at a fleet: nodes that come, go or start anew, versions that go live."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from loader.registry.fleet import NodeRecord
from loader.rollout.fleet_state import FleetState
from loader.rollout.plan import Rollout

MAX_EVENTS = 200
MAX_GONE = 64
GONE_S = 900.0
"""How long a node that has gone is still shown."""
MAX_TEXT = 400


@dataclass(frozen=True, slots=True)
class Gone:
    """A node that is not announced any more, since `at`, in seconds since the epoch."""

    node: NodeRecord
    at: float


class Changes:
    """What has changed since the first look. Bounded.

    Attributes:
        gone: nodes that went not long ago, by node id.
        events: the last ones, the newest last, as they are shown.
    """

    def __init__(self) -> None:
        self.gone: dict[str, Gone] = {}
        self.events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._before: FleetState | None = None

    def look(self, state: FleetState, now: float) -> None:
        """Compare with the look before."""
        before, self._before = self._before, state
        there = {node.node_id: node for node in state.nodes}
        self.gone = {key: one for key, one in self.gone.items() if key not in there and now - one.at < GONE_S}
        if before is None:
            return
        tell = self._teller(now)
        were = {node.node_id: node for node in before.nodes}
        for node_id in sorted(were.keys() - there.keys()):
            node = were[node_id]
            tell("left", "left the fleet" if node.draining else "is gone: its lease ran out", node=node_id)
            self.gone[node_id] = Gone(node, now)
            while len(self.gone) > MAX_GONE:
                del self.gone[next(iter(self.gone))]
        for node_id in sorted(there.keys() - were.keys()):
            tell("joined", f"joined at {there[node_id].address or 'no address'}", node=node_id)
        for node_id in sorted(there.keys() & were.keys()):
            for kind, text in _of_node(were[node_id], there[node_id]):
                tell(kind, text, node=node_id)
        for model, text in _of_live(before, state):
            tell("flip", text, model=model)
        for model, rollout in before.rollouts.items():
            if (now_there := state.rollouts.get(model)) is None or now_there.rollout_id != rollout.rollout_id:
                # A registry keeps the last rollout only.
                self.events.extend(_of_rollout(rollout))
        if before.coordinator != state.coordinator:
            told = f"the coordinator is {state.coordinator}" if state.coordinator else "no coordinator is running"
            tell("coordinator", told)

    def registry(self, text: str, now: float) -> None:
        """Note that the registry can't be read, or can be again."""
        self._teller(now)("registry", text)

    def _teller(self, now: float) -> Callable[..., None]:
        def tell(kind: str, text: str, *, node: str = "", model: str = "") -> None:
            self.events.append({"at": now, "kind": kind, "node": node, "model": model, "text": text[:MAX_TEXT]})

        return tell


def told_events(changes: Changes, state: FleetState, most: int) -> list[dict[str, Any]]:
    """List what was noticed and what rollouts have on record, the newest first; at most so many."""
    found = [*changes.events, *(event for rollout in state.rollouts.values() for event in _of_rollout(rollout))]
    # Of those of one moment, what was noticed last comes first.
    return sorted(found, key=lambda one: float(one["at"]))[-most:][::-1]


def _of_rollout(rollout: Rollout) -> Iterator[dict[str, Any]]:
    for event in rollout.events:
        yield {
            "at": event.at,
            "kind": event.step,
            "node": "",
            "model": rollout.model,
            "text": f"version {rollout.to_version}: {event.text}"[:MAX_TEXT],
        }


def _of_node(before: NodeRecord, now: NodeRecord) -> Iterator[tuple[str, str]]:
    if before.process_id != now.process_id:
        yield "joined", f"started anew, as process {now.process_id}"
    elif now.draining and not before.draining:
        yield "left", "is about to end"
    refused = {(one.model, one.version) for one in before.versions if one.state == "refused"}
    for one in now.versions:
        if one.state == "refused" and (one.model, one.version) not in refused:
            yield "refused", f"refuses {one.model} version {one.version}: {one.reason}"


def _of_live(before: FleetState, now: FleetState) -> Iterator[tuple[str, str]]:
    were, are = _live(before), _live(now)
    for model in sorted(were.keys() | are.keys()):
        if (was := were.get(model)) != (version := are.get(model)):
            after = "" if was is None else f", after version {was}"
            yield model, "no version is wanted live" if version is None else f"version {version} is to be live{after}"


def _live(state: FleetState) -> Mapping[str, int | None]:
    return {model: wanted.live for model, wanted in state.wanted.items()}
