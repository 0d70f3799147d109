"""What the cost model says of a launch, to stand beside what was measured."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from loadtest.gpu_rows import one_table_layout
from shard_node.cuda.batch_time import batch_time
from shard_node.cuda.card_plan import PLACE_BYTES, CardBudget, CardPlan
from shard_node.cuda.card_systems import SYSTEMS, CardSystem
from shard_node.cuda.cost_model import BagLoad, Traffic
from shard_node.cuda.hotness import Hotness
from shard_node.cuda.row_format import RowFormat
from shard_node.node import Partition

PLAN_ROWS = 1 << 20
"""Of the table that stands for the real one: with uniform ids only the shares of the tiers count."""
BASE = "h100"


def system_with(copy_gb_per_s: float | None, bus_gb_per_s: float | None) -> CardSystem:
    """One card with the bandwidths that were measured; what was not is an H100's, from its data sheet."""
    base = SYSTEMS[BASE]
    host = base.host if bus_gb_per_s is None else base.host.model_copy(update={"gb_per_s": bus_gb_per_s})
    hbm = base.hbm_gb_per_s if copy_gb_per_s is None else copy_gb_per_s
    return base.model_copy(update={"name": "measured", "cards": 1, "host": host, "hbm_gb_per_s": hbm})


def predicted_us(system: CardSystem, dim: int, hotness: int, batch: int, share_on_card: float = 1.0) -> float:
    """Of one launch with uniform ids, fp32 out, on one card: the longest of card memory, bus and latency."""
    load = BagLoad(float(hotness * batch), float(batch), float(hotness))
    time = batch_time(Traffic.of(_plan(dim, share_on_card), [load], system, 4), system)
    return max(time.hbm_us, time.host_us, time.latency_us)


@lru_cache(maxsize=64)
def _plan(dim: int, share_on_card: float) -> CardPlan:
    layout = one_table_layout(dim, PLAN_ROWS)
    stride = RowFormat.of("int8", dim).stride
    on_card = round(PLAN_ROWS * share_on_card)
    budget = CardBudget((on_card * stride + PLAN_ROWS * PLACE_BYTES,), (PLAN_ROWS - on_card) * stride)
    partition = Partition(1, np.zeros((1, 256), np.int16))
    return CardPlan.make(layout, partition, budget, Hotness.by_table(layout), allow_mapped=False)
