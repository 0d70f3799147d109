"""What a change of a plan relieves: the memory of a host, the network, or row updates. Pure.

M_table = R * D * b bytes are the rows of all tables, and M_comm = (1 - h) * B * L * D * b those that a step fetches
that no copy near it answers: the textbook's two budgets. The third is row updates: each goes to all replicas of its
shard, and to every worker that has a copy of the row.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from loader.snapshot.manifest import ModelSpec
from loader.snapshot.tables import Frozen, TableSpec, refused_as
from router.errors import PlanError
from router.plan import Plan
from router.planning.capacity import model_sizes
from router.planning.inputs import GB, CapacityOptions, CpuNode, LookupProfile
from router.planning.network import FleetLookups, StoredLookups, stored_row_bytes

BUDGETS = ("memory", "network", "updates")


class StepOptions(Frozen):
    """What shares the rows, and the time of a step, which is also a batch of every worker."""

    # Nodes that have the same shard; processes that look rows up, each with its copies of the hottest.
    replicas: int = Field(default=1, ge=1)
    workers: int = Field(default=1, ge=1)
    # Rows a second that training changes.
    update_rate: float = Field(default=0.0, ge=0)
    step_ms: float = Field(default=10.0, gt=0)


def resized(spec: ModelSpec, profile: LookupProfile, rows: int | None, dim: int | None) -> ModelSpec:
    """Return the model with so many rows in its largest table, or columns in its widest; others in proportion.

    Raises PlanError for a model whose tables are divided, a number out of range, or rows that counts are not of.
    """
    if rows is None and dim is None:
        return spec
    if spec.divided or any(len(table.slices) > 1 for table in spec.tables):
        raise PlanError("rows and dim: tables that are stored in parts are resized in the model's description")
    if rows is not None and profile.counts:
        raise PlanError(f"rows: {rows} are not the rows that access counts are of; plan with zipf instead")
    given, tables = {"num_embeddings": rows, "embedding_dim": dim}, []
    largest = {name: max(getattr(table, name) for table in spec.tables) for name in given}
    for table in spec.tables:
        changed = {
            name: max(1, round(getattr(table, name) * number / largest[name]))
            for name, number in given.items()
            if number is not None
        }
        with refused_as(PlanError, f"table {table.name!r}: ", TableSpec):
            tables.append(TableSpec.model_validate(table.model_dump() | changed))
    return spec.model_copy(update={"tables": tuple(tables)})


def step_use(spec: ModelSpec, profile: LookupProfile, fleet: CapacityOptions, step: StepOptions) -> dict[str, Any]:
    """Return the bytes of all tables, of a step, and of the three budgets, as JSON's objects.

    `table_bytes` is M_table, with scales and biases `stored_bytes`; `comm_bytes` M_comm, and `sent_bytes` what a step
    of one worker sends and gets by the frames of this project: ids and sums. `line_bytes` are M_comm on the busiest
    line, the worker's or a shard's; `broadcast_bytes` what all workers get once for their copies of rows.
    Raises PlanError: it can't be sharded so.
    """
    plan = Plan.make(spec, fleet.shards, fleet.sharding, fleet.cards, fleet.replicate_bytes)
    stored = StoredLookups.of(spec, plan.layout, fleet, profile)
    lookups, near, network = FleetLookups(plan, stored), stored.near, fleet.shard_network
    sizes, sent, values = model_sizes(spec), lookups.sent(near), lookups.loads[:, 0]
    comm = lookups.moved_bytes if fleet.shards > 1 else 0.0
    line = comm * max(1.0, step.workers / (fleet.shards * step.replicas))
    mean_row_bytes = float(values @ stored_row_bytes(plan.layout) / values.sum()) if values.any() else 0.0
    copies = step.replicas + step.workers * near.hit_rate
    node_gb = fleet.system.ram_gb if isinstance(fleet.system, CpuNode) else fleet.card_memory_gb * fleet.cards
    step_bytes = network.gb_per_s * GB * step.step_ms / 1e3
    host = sum(lookups.table_bytes(int(lookups.stored_bytes.argmax())))
    updates = step.update_rate * mean_row_bytes * copies * step.step_ms / 1e3
    limits: dict[str, float] = {"memory": node_gb * GB / fleet.versions, "network": step_bytes, "updates": step_bytes}
    used: dict[str, float] = {"memory": host, "network": line, "updates": updates}
    shares = {name: used[name] / limits[name] for name in BUDGETS}
    return {
        "table_bytes": sizes["code_bytes"],
        "stored_bytes": sizes["stored_bytes"],
        "hosts": fleet.shards * step.replicas,
        "host_bytes": host,
        "hit_rate": near.hit_rate,
        "hot_rows": near.num_rows,
        "broadcast_bytes": near.size_bytes * step.workers,
        "comm_bytes": comm,
        "comm_us": comm / network.gb_per_s / 1e3,
        "sent_bytes": float((sent.requests + sent.replies).sum()) if fleet.shards > 1 else 0.0,
        "line_bytes": line,
        "update_bytes": updates,
        "binds": max(BUDGETS, key=shares.__getitem__),
        "budgets": {
            name: {"bytes": used[name], "limit_bytes": limits[name], "share": shares[name]} for name in BUDGETS
        },
    }


def compared_use(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return two uses by `step_use`, which budgets the change relieves and which it burdens, and each one's bytes."""
    uses, budgets, changes = {"before": before, "after": after}, [], dict[str, float]()
    for name in BUDGETS:
        of_budget: dict[str, Any] = {"budget": name}
        for when, use in uses.items():
            of_budget |= {f"{when}_{what}": value for what, value in use["budgets"][name].items()}
        changes[name] = of_budget["after_share"] - of_budget["before_share"]
        budgets.append(of_budget)
    return {
        "relieves": [name for name, change in changes.items() if change < -1e-9],
        "burdens": [name for name, change in changes.items() if change > 1e-9],
        **{when: {name: value for name, value in use.items() if name != "budgets"} for when, use in uses.items()},
        "budgets": budgets,
    }
