"""How a model is looked up: ids in a bag of each feature, and how they spread over rows. Planning needs to be told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from loader.golden import GoldenRequests
from loader.manifest import ModelSpec, TableSpec
from serving.errors import LookupProfileError
from shard_node.cuda.cost_model import BagLoad
from shard_node.cuda.hotness import Hotness
from shard_node.table_layout import TableLayout

MAX_HOTNESS = 1_000_000
MAX_ZIPF = 8.0


@dataclass(frozen=True)
class LookupProfile:
    """Ids of each feature, and their skew.

    Attributes:
        hotness: by feature, ids in a bag in the mean; 1 for a feature that is not there.
        longest: by feature, ids of the longest bag; `hotness` for a feature that is not there.
        zipf: exponent of the power law of row numbers, 0 for uniform; of tables without counts.
        counts: by table, uint32 [num_embeddings], observed lookups of each row.
    """

    hotness: Mapping[str, float] = field(default_factory=dict)
    longest: Mapping[str, float] = field(default_factory=dict)
    zipf: float = 0.0
    counts: Mapping[str, npt.NDArray[np.uint32]] = field(default_factory=dict)

    @classmethod
    def of_requests(cls, requests: GoldenRequests, zipf: float = 0.0) -> LookupProfile:
        """The ids that a set of requests has in each bag."""
        lengths = requests.lengths
        return cls(
            {name: float(one.mean()) if one.size else 0.0 for name, one in lengths.items()},
            {name: float(one.max(initial=0)) for name, one in lengths.items()},
            zipf,
        )

    def with_hotness(self, spec: ModelSpec, told: Mapping[str, float]) -> LookupProfile:
        """The same but for features whose hotness is told.

        Raises:
            LookupProfileError: a feature that the model does not have, or a number out of range.
        """
        known = {feature.name for feature in spec.features}
        for name, ids in told.items():
            if name not in known:
                raise LookupProfileError(f"hotness of {name!r}: model {spec.model!r} has no such feature")
            if not 0 <= ids <= MAX_HOTNESS:
                raise LookupProfileError(f"hotness of {name!r} is {ids}, allowed is 0..{MAX_HOTNESS}")
        return replace(self, hotness={**self.hotness, **told}, longest={**self.longest, **told})

    def with_zipf(self, zipf: float) -> LookupProfile:
        """The same with another skew in place of counts. Raises LookupProfileError for one out of range."""
        if not 0 <= zipf <= MAX_ZIPF:
            raise LookupProfileError(f"zipf is {zipf}, allowed is 0..{MAX_ZIPF:g}")
        return replace(self, zipf=zipf, counts={})

    def ids_of(self, feature: str) -> float:
        """Ids in a bag, in the mean."""
        return self.hotness.get(feature, 1.0)

    def loads(self, spec: ModelSpec, layout: TableLayout, requests: float, candidates: float) -> tuple[BagLoad, ...]:
        """What a batch asks of each table, in layout order: context features once a request, others once a candidate.

        Args:
            spec: the model.
            layout: its tables.
            requests: of the batch.
            candidates: of the batch, all requests together.
        """
        return tuple(self._load(spec, table, requests, candidates) for table in layout.tables)

    def placement(self, spec: ModelSpec, layout: TableLayout, requests: float, candidates: float) -> Hotness:
        """What placement is told: the same lookups, by table."""
        loads = self.loads(spec, layout, requests, candidates)
        lookups = {table.name: load.values for table, load in zip(layout.tables, loads, strict=True)}
        return Hotness(self.counts, lookups, dict.fromkeys(lookups, self.zipf))

    def _load(self, spec: ModelSpec, table: TableSpec, requests: float, candidates: float) -> BagLoad:
        values = bags = longest = 0.0
        for name in table.feature_names:
            times = requests if spec.feature(name).side == "context" else candidates
            ids = self.ids_of(name)
            values += times * ids
            # A bag of a feature that is not pooled is one id.
            bags += times * (ids if spec.pooling_of(name) == "none" else 1)
            longest = max(longest, 1.0 if spec.pooling_of(name) == "none" else self.longest.get(name, ids))
        return BagLoad(values, bags, longest)
