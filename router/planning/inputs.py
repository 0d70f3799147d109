"""The inputs of a plan: the nodes and the batch, what it looks up in each table, and published models by name.

The models are in `catalog.json`, tables that are alike as one entry: how many, ids in a bag of each feature that is
looked up in such a table, rows, embedding_dim.

- `dlrm-v2`: MLPerf's DLRM-v2 on Criteo 1TB, multi-hot (github.com/mlcommons/training,
  recommendation_v2/torchrec_dlrm/README.MD: table sizes and hotness).
- `dlrm-criteo-113b`: DLRM on the same data without a cap on tables, an id a feature (the click logs themselves).
- `merlin-tiny` to `merlin-colossal`: the synthetic models of NVIDIA-Merlin/distributed-embeddings
  (examples/benchmarks/synthetic_models/config_v3.py), ids by a power law of exponent 1.05 (its README).
- `textbook`: one table of 2 * 10^9 rows of 128, 40 lookups a sample: easy to calculate by hand.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field

from loader.errors import ConfigError
from loader.snapshot.manifest import DenseInputs, DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.tables import Frozen, RowDtype, TableSpec
from router.errors import PlanError
from router.plan import DEFAULT_REPLICATE_BYTES
from shard_node.bags import TableLayout
from shard_node.buckets import Sharding
from shard_node.planning.card_plan import CardBudget
from shard_node.planning.cost_model import CardSystem, Link
from shard_node.planning.hotness import Head, Hotness, PartOfRanks, ranked_share

GB = 1_000_000_000
MAX_HOTNESS = 1_000_000
SumFormat: TypeAlias = Literal["float32", "float16", "int8"]
"""As in `shard_node.answer`, which takes PyTorch; a test compares them."""
SUM_TAIL_BYTES = 8
"""Of a sum as an int8 row: its scale and bias."""
CPU_ROW_BYTES = 128
"""What a row of `CpuNode.rows_per_s` counts for where tables of several widths are divided."""
CATALOG: dict[str, Any] = json.loads(Path(__file__).with_name("catalog.json").read_bytes())


class NetworkOptions(Frozen):
    """The network between router and shards, and the rows at the router."""

    # Of the router's line, in 10^9 bytes a second of one direction; it carries what all shards send.
    gb_per_s: float = Field(gt=0)
    # Of a round trip, unloaded.
    latency_us: float = Field(ge=0)
    # Of each shard's line; None for one that never binds.
    shard_gb_per_s: float | None = Field(default=None, gt=0)
    # The narrowest format of sums that the router accepts.
    sums: SumFormat = "float16"
    # For the hottest rows; or how many there are; or the share of the lookups that they answer.
    hot_rows_gb: float = Field(default=0.0, ge=0)
    hot_rows: int | None = Field(default=None, ge=0)
    hit_rate: float | None = Field(default=None, ge=0, le=1)

    def sum_bytes(self, dim: int) -> int:
        """Return the bytes of a sum of so many columns on the wire, as `shard_node.answer.rounded` makes it."""
        return {"float32": 4 * dim, "float16": 2 * dim, "int8": min(dim + SUM_TAIL_BYTES, 2 * dim)}[self.sums]


ANY_NETWORK = NetworkOptions(gb_per_s=12.5, latency_us=0.0)
"""Of a single node: what is cheapest does not depend on it."""


class CpuNode(CardSystem):
    """A node without GPUs: what the planner of cards needs is of one core, over links that cost nothing."""

    cores: int = Field(ge=1)
    # For the rows of all versions together; on the disk are the tables that RAM has no room for.
    ram_gb: float = Field(gt=0)
    disk_gb: float = Field(ge=0)
    # What one core pools of a model's rows, which are in RAM.
    rows_per_s: float = Field(gt=0)

    @classmethod
    def of(cls, ram_gb: float, rows_per_s: float, **more: float) -> Self:
        """Make a node whose RAM is one card."""
        link, gb_per_s = Link(gb_per_s=1e9, header_bytes=0, latency_us=0), rows_per_s * CPU_ROW_BYTES / GB
        free = {"peer": link, "host": link, "host_memory_gb_per_s": 1e9, "hbm_latency_us": 0, "launch_us": 0}
        memory = {"card_memory_gb": ram_gb, "hbm_gb_per_s": gb_per_s, "ram_gb": ram_gb}
        return cls.model_validate({"name": "cpu", "cards": 1, "rows_per_s": rows_per_s, **free, **memory, **more})


class CapacityOptions(Frozen):
    """The nodes and the batch to plan for. 1 GB is 10^9 bytes."""

    system: CardSystem
    # Of each node, and memory for all versions together.
    cards: int = Field(ge=1, le=64)
    card_memory_gb: float = Field(gt=0)
    pinned_memory_gb: float = Field(ge=0)
    # Of each card, for one version's copies of hot rows; None as the engine chooses.
    hot_gb: float | None = Field(default=None, ge=0)
    versions: int = Field(default=1, ge=1, le=8)
    shards: int = Field(default=1, ge=1, le=1024)
    sharding: Sharding = "hash"
    replicate_bytes: int = Field(default=DEFAULT_REPLICATE_BYTES, ge=0)
    peer_access: bool = True
    requests: int = Field(default=1, ge=1)
    # Candidates of all requests together; no network for a single node.
    candidates: int = Field(default=500, ge=1)
    network: NetworkOptions | None = None

    @property
    def budget(self) -> CardBudget:
        """Return the memory of a node for one version."""
        return CardBudget(
            (int(self.card_memory_gb * GB / self.versions),) * self.cards,
            int(self.pinned_memory_gb * GB / self.versions),
            None if self.hot_gb is None else int(self.hot_gb * GB),
            self.peer_access,
        )

    @property
    def shard_network(self) -> NetworkOptions:
        """Return `network`, or `ANY_NETWORK`."""
        return self.network or ANY_NETWORK


class TableLookups(NamedTuple):
    """What a batch looks up in one table; means over batches need not be whole numbers."""

    values: float
    bags: float
    # Ids of the longest bag.
    longest: float
    # Ids of a bag, and how many bags have as many.
    lengths: tuple[tuple[float, float], ...]

    def missed(self, hit_rate: float) -> TableLookups:
        """Return what is left without the lookups that hot rows at the router answer."""
        lengths = tuple((length * (1 - hit_rate), bags) for length, bags in self.lengths)
        return self._replace(values=self.values * (1 - hit_rate), lengths=lengths)

    def bags_hit(self, shards: int) -> float:
        """Return how many bags are sent, to all shards together, if each of so many has a row with the same chance.

        A bag of L ids is sent to S * (1 - (1 - 1 / S) ** L) of S shards in the mean.
        """
        if shards == 1:
            return sum(bags * min(1.0, length) for length, bags in self.lengths)
        return sum(bags * float(shards * (1 - (1 - 1 / shards) ** length)) for length, bags in self.lengths)


@dataclass(frozen=True)
class LookupProfile:
    """Ids of each feature, and their skew.

    Attributes:
        hotness: by feature, ids in a bag in the mean; 1 for a feature that is not in it.
        zipf: exponent of the power law of row numbers, 0 for uniform; of tables without counts.
        head: the rows that the power law is of; None for all of a table.
        counts: by table of the model, sliced or not, uint32 [num_embeddings], observed lookups of each row.
    """

    hotness: Mapping[str, float] = field(default_factory=dict)
    zipf: float = 0.0
    head: Head | None = None
    counts: Mapping[str, npt.NDArray[np.uint32]] = field(default_factory=dict)

    def with_hotness(self, spec: ModelSpec, hotness: Mapping[str, float]) -> LookupProfile:
        """Return the same but for some features.

        Raises PlanError for a feature that the model does not have, or a number out of range.
        """
        known = {feature.name for feature in spec.features}
        for name, ids in hotness.items():
            if name not in known:
                raise PlanError(f"hotness of {name!r}: model {spec.model!r} has no such feature")
            if not 0 <= ids <= MAX_HOTNESS:
                raise PlanError(f"hotness of {name!r} is {ids}, allowed is 0..{MAX_HOTNESS}")
        return replace(self, hotness={**self.hotness, **hotness})

    def lookups(
        self, spec: ModelSpec, layout: TableLayout, requests: float, candidates: float
    ) -> tuple[TableLookups, ...]:
        """Return what a batch looks up in each stored table, in layout order.

        Context features are looked up by request, others by candidate. Bags of a feature are all as long as their mean.
        A part by popularity is looked up for its share of the ids, but for as many bags as its table.
        """
        shares, lookups = self._part_shares(spec), []
        for table in layout.tables:
            share, lengths = shares.get(table.name, 1.0), []
            for name in table.feature_names:
                bags = requests if spec.feature(name).side == "context" else candidates
                mean = self.hotness.get(name, 1.0)
                # A bag of what is not pooled is one id.
                lengths.append((mean * share, bags) if spec.pooling_of(name) != "none" else (share, bags * mean))
            values, all_bags = sum(bags * ids for ids, bags in lengths), sum(bags for _, bags in lengths)
            lookups.append(TableLookups(float(values), float(all_bags), max(lengths)[0], tuple(lengths)))
        return tuple(lookups)

    def rows(self, spec: ModelSpec, layout: TableLayout, lookups: Sequence[TableLookups]) -> Hotness:
        """Return how often the rows of stored tables are looked up: slices of a table like the table."""
        counts = {stored.name: self.counts.get(table.name) for table in spec.tables for stored in table.slices}
        return Hotness(
            {name: of_rows for name, of_rows in counts.items() if of_rows is not None},
            {table.name: of_table.values for table, of_table in zip(layout.tables, lookups, strict=True)},
            self.zipf,
            self.head,
            _part_ranks(spec),
        )

    def _part_shares(self, spec: ModelSpec) -> dict[str, float]:
        """Return the share of its table's lookups that each part by popularity has, by counts or the power law."""
        ranks, shares = _part_ranks(spec), dict[str, float]()
        for table in spec.divided:
            names = [part for part in table.parts if part in ranks]
            lookups = [float(self.counts[part].sum(dtype=np.uint64)) if part in self.counts else 0.0 for part in names]
            if not any(lookups):
                # The last part's last row stands for those that are pruned.
                ends = np.array([*(ranks[part].before for part in names), table.num_embeddings])
                lookups = np.diff(ranked_share(ends, table.num_embeddings, self.zipf, self.head)).tolist()
            shares |= {part: of_part / sum(lookups) for part, of_part in zip(names, lookups, strict=True)}
        return shares


def _part_ranks(spec: ModelSpec) -> dict[str, PartOfRanks]:
    ranks = {}
    for table in spec.divided:
        if table.by == "popularity":
            rows = [part.num_embeddings for part in spec.parts(table)]
            for part, end, num_rows in zip(table.parts, itertools.accumulate(rows), rows, strict=True):
                ranks[part] = PartOfRanks(end - num_rows, table.num_embeddings)
    return ranks


def catalog_model(named: str, dtype: RowDtype = "int8") -> tuple[ModelSpec, LookupProfile]:
    """Return a published model, and its ids.

    `named` is one of `CATALOG`, with `:SCALE` for that share of its rows: every table keeps at least one; `dtype` is
    that of stored rows, which are published as float32. Raises ConfigError for a scale that is none.
    """
    name, colon, text = named.partition(":")
    try:
        scale = float(text) if colon else 1.0
    except ValueError:
        scale = 0.0
    if not 0 < scale <= 1:
        raise ConfigError(f"model {named!r}: the scale of its rows must be above 0 and at most 1")
    published, tables = CATALOG[name], []
    hotness: dict[str, float] = {}
    for number, (_, bags, rows, dim) in enumerate(entry for entry in published["tables"] for _ in range(entry[0])):
        features = {f"f{number}" if len(bags) == 1 else f"f{number}_{ids}": ids for ids in bags}
        hotness |= features
        tables.append(
            TableSpec(
                name=f"t{number}",
                num_embeddings=max(1, round(rows * scale)),
                embedding_dim=dim,
                feature_names=tuple(features),
                dtype=dtype,
            )
        )
    spec = ModelSpec(
        model=name,
        tables=tuple(tables),
        features=tuple(FeatureSpec(name=feature, side="candidate") for feature in hotness),
        dense_inputs=DenseInputs(candidate=published["num_dense"]),
        dense_model=DenseModelSpec.model_validate(published["dense_model"]),
    )
    return spec, LookupProfile(hotness=hotness, zipf=published["zipf"])
