"""Is a fleet exactly in one version? Pure: what is wanted and what the nodes announce in, who lags out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loader.registry.fleet import NodeRecord, WantedModel
from loader.rollout.plan import Rollout


def unsettled(
    model: str,
    wanted: WantedModel | None,
    rollout: Rollout | None,
    nodes: Sequence[NodeRecord],
    process_ids: Mapping[str, int],
) -> str:
    """Why a fleet is not exactly in one version of a model; empty if it is.

    Args:
        model: which.
        wanted: what is wanted of it.
        rollout: its last one.
        nodes: what is announced.
        process_ids: of all nodes that there must be, by node id: an announcement of a dead process does not count.
    """
    if wanted is None or wanted.live is None:
        return "no version is wanted"
    if rollout is not None and rollout.active:
        return f"the rollout is {rollout.state} in step {rollout.step}"
    only = (wanted.live,)
    if (wanted.hold, wanted.serve, wanted.canary, wanted.node_hold) != (only, only, None, {}):
        return f"more than version {wanted.live} is wanted: {wanted.model_dump_json()}"
    by_id = {node.node_id: node for node in nodes}
    for node_id, process_id in process_ids.items():
        node = by_id.get(node_id)
        if node is None or node.process_id != process_id:
            return f"{node_id}: its process {process_id} has not announced itself"
        if reason := _lag_of(node, model, wanted.live):
            return f"{node_id}: {reason}"
    return ""


def _lag_of(node: NodeRecord, model: str, version: int) -> str:
    states = {report.version: report.state for report in node.versions if report.model == model}
    if states != {version: "ready"}:
        return f"has {states or 'nothing'}, not just version {version} ready"
    if node.kind == "serving" and node.live.get(model) != version:
        return f"answers with version {node.live.get(model)}, not {version}"
    return ""
