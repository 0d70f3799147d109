"""What a batch looks up in each table, by ids of a bag of each feature, and how often each row is looked up."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loader.snapshot.golden import GoldenRequests
from loader.snapshot.manifest import ModelSpec
from router.errors import PlanError
from shard_node.bags import TableLayout
from shard_node.planning.cost_model import BagLoad
from shard_node.planning.hotness import Head, Hotness, PartOfRanks, ranked_share

MAX_HOTNESS = 1_000_000


class TableLookups(NamedTuple):
    """What a batch looks up in one table.

    Attributes:
        load: ids and bags.
        lengths: ids of a bag, and how many bags have as many.
    """

    load: BagLoad
    lengths: tuple[tuple[float, float], ...]

    def missed(self, hit_rate: float) -> TableLookups:
        """Return what is left without the lookups that hot rows at the router answer."""
        load = self.load._replace(values=self.load.values * (1 - hit_rate))
        return TableLookups(load, tuple((length * (1 - hit_rate), bags) for length, bags in self.lengths))

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
        hotness: by feature, ids in a bag in the mean; 1 for a feature that is not there.
        longest: by feature, ids of the longest bag; `hotness` for a feature that is not there.
        zipf: exponent of the power law of row numbers, 0 for uniform; of tables without counts.
        head: the rows that the power law is of; None for all of a table.
        counts: by table of the model, sliced or not, uint32 [num_embeddings], observed lookups of each row.
    """

    hotness: Mapping[str, float] = field(default_factory=dict)
    longest: Mapping[str, float] = field(default_factory=dict)
    zipf: float = 0.0
    head: Head | None = None
    counts: Mapping[str, npt.NDArray[np.uint32]] = field(default_factory=dict)

    @classmethod
    def of_requests(cls, requests: GoldenRequests) -> LookupProfile:
        """Count the ids that a set of requests has in each bag."""
        lengths = requests.lengths
        return cls(
            {name: float(bags.mean()) if bags.size else 0.0 for name, bags in lengths.items()},
            {name: float(bags.max(initial=0)) for name, bags in lengths.items()},
        )

    def with_hotness(self, spec: ModelSpec, hotness: Mapping[str, float]) -> LookupProfile:
        """Return the same but for some features, whose bags are all as long as given.

        Raises:
            PlanError: a feature that the model does not have, or a number out of range.
        """
        known = {feature.name for feature in spec.features}
        for name, ids in hotness.items():
            if name in known and 0 <= ids <= MAX_HOTNESS:
                continue
            problem = f"hotness of {name!r} is {ids}, allowed is 0..{MAX_HOTNESS}"
            if name not in known:
                problem = f"hotness of {name!r}: model {spec.model!r} has no such feature"
            raise PlanError(problem, kind="lookup_profile", http_status=400, grpc_status="INVALID_ARGUMENT")
        return replace(self, hotness={**self.hotness, **hotness}, longest={**self.longest, **hotness})

    def lookups(
        self, spec: ModelSpec, layout: TableLayout, requests: float, candidates: float
    ) -> tuple[TableLookups, ...]:
        """Return what a batch looks up in each stored table, in layout order.

        Context features are looked up by request, others by candidate. Bags of a feature are all as long as their mean.
        A part by popularity is looked up for its share of the ids, but for as many bags as its table.
        """
        shares, lookups = self._part_shares(spec), []
        for table in layout.tables:
            share = shares.get(table.name, 1.0)
            bags, ids, longest = [], [], []
            for name in table.feature_names:
                times = requests if spec.feature(name).side == "context" else candidates
                mean = self.hotness.get(name, 1.0)
                # A bag of what is not pooled is one id.
                is_single = spec.pooling_of(name) == "none"
                bags.append(times * mean if is_single else times)
                ids.append(share if is_single else mean * share)
                longest.append(1.0 if is_single else self.longest.get(name, mean) * share)
            values = sum(many * length for many, length in zip(bags, ids, strict=True))
            lookups.append(TableLookups(BagLoad(values, sum(bags), max(longest)), tuple(zip(ids, bags, strict=True))))
        return tuple(lookups)

    def rows(self, spec: ModelSpec, layout: TableLayout, lookups: Sequence[TableLookups]) -> Hotness:
        """Return how often the rows of stored tables are looked up: slices of a table like the table."""
        counts = {stored.name: self.counts.get(table.name) for table in spec.tables for stored in table.slices}
        return Hotness(
            {name: of_rows for name, of_rows in counts.items() if of_rows is not None},
            {table.name: of_table.load.values for table, of_table in zip(layout.tables, lookups, strict=True)},
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
    """Return which ranks of their tables the rows of parts by popularity have, by name."""
    ranks = {}
    for table in spec.divided:
        if table.by == "popularity":
            rows = [part.num_embeddings for part in spec.parts(table)]
            for part, end, num_rows in zip(table.parts, itertools.accumulate(rows), rows, strict=True):
                ranks[part] = PartOfRanks(end - num_rows, table.num_embeddings)
    return ranks
