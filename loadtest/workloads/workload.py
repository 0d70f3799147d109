"""Workloads: the requests that are sent to a model, drawn or replayed, and the distributions that they are drawn from.

`CandidateCounts` draw the number of candidates of one request. `IdDistribution`s draw popularity ranks, int64 [n], rank
i in 0..num_rows[i] - 1 with 0 for the most popular row; the numbers of rows are from 1 to 2^32 - 1. `RowScatter` says
which row has a rank. Nothing is kept for each row, so tables of 40 million rows cost what tables of ten do. Each has
the name that `parse_candidates` or `parse_ids` reads.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from loader.errors import ConfigError, nearest
from loader.snapshot.manifest import ModelSpec
from router.feature_schema import FeatureSchema
from serving.formats.requests import RankRequest
from shard_node.bags import Bags, Float32Array, Int64Array
from shard_node.planning.hotness import power_law_sums

Float64Array = npt.NDArray[np.float64]

ID_FACTOR = np.int64(-7046029254386353131)
"""Odd, so that no two numbers have the same product modulo 2^64."""
MAX_CANDIDATES = 2**20
MAX_HOTNESS = 4096
_RANGE = re.compile(r"(\d+)(?:-(\d+):(\d+(?:\.\d+)?))?", re.ASCII)


@dataclass(frozen=True)
class CandidateCounts:
    """Always the same number, or from `least` to `most` with a given mean, at the largest entropy: P(n) ~ q^n.

    MLPerf's DLRM-v2 asks for 100 to 700 user-item pairs with a mean of 270.
    """

    least: int
    most: int
    mean: float

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most <= MAX_CANDIDATES:
            raise ConfigError(f"candidates: {self.name}: numbers must ascend and be in 1..{MAX_CANDIDATES}")
        # Nearer to an end than this, a few numbers would have all the weight: ask for a fixed number instead.
        margin = (self.most - self.least) / 100
        if not self.least + margin <= self.mean <= self.most - margin:
            low, high = self.least + margin, self.most - margin
            raise ConfigError(f"candidates: {self.name}: the mean must be in {low:g}..{high:g}")

    @property
    def name(self) -> str:
        """Write it as `100` or `100-700:270`."""
        return str(self.least) if self.least == self.most else f"{self.least}-{self.most}:{self.mean:g}"

    def draw(self, rng: np.random.Generator) -> int:
        """Draw by the inverse of the cumulated distribution."""
        if self.least == self.most:
            return self.least
        return self.least + int(np.searchsorted(self._cumulated, rng.random(), side="right"))

    @cached_property
    def _cumulated(self) -> Float64Array:
        """float64 [most - least], P(number <= least + i); what is above the last is `most`."""
        span = self.most - self.least
        steps, low, high = np.arange(span + 1), -100.0 / span, 100.0 / span
        for _ in range(200):
            log_q = (low + high) / 2
            weights = np.exp(steps * log_q - max(0.0, span * log_q))
            weights /= math.fsum(weights)
            low, high = (log_q, high) if self.least + float((weights * steps).sum()) < self.mean else (low, log_q)
        return np.cumsum(weights)[:-1]


MLPERF_CANDIDATES = CandidateCounts(100, 700, 270)
VARIED_CANDIDATES = CandidateCounts(50, 500, 200)


def parse_candidates(text: str) -> CandidateCounts:
    """Read `N`, or `LEAST-MOST:MEAN` such as `100-700:270`. Raises ConfigError."""
    if (match := _RANGE.fullmatch(text)) and match[1] != match[2]:
        return CandidateCounts(int(match[1]), int(match[2] or match[1]), float(match[3] or match[1]))
    raise ConfigError(f"candidates: {text!r} is not N or LEAST-MOST:MEAN, such as 100 or 100-700:270")


MAX_ZIPF_EXPONENT = 10.0
_ZIPF = re.compile(r"zipf(?::|\()(\d+(?:\.\d+)?)\)?")


@dataclass(frozen=True)
class Uniform:
    """Every row alike: the worst case for caches."""

    name: str = "uniform"

    def ranks(self, rng: np.random.Generator, num_rows: Int64Array) -> Int64Array:
        """Draw ranks."""
        return rng.integers(0, num_rows, dtype=np.int64)


@dataclass(frozen=True)
class Zipf:
    """P(rank) proportional to (rank + 1)^-exponent, exactly, with a table's own number of rows.

    By rejection-inversion: Hörmann and Derflinger, "Rejection-inversion to generate variates from monotone discrete
    distributions", ACM TOMACS 6(3), 1996. Names below are the paper's, with v = 0.
    """

    exponent: float

    def __post_init__(self) -> None:
        if not 0 < self.exponent <= MAX_ZIPF_EXPONENT:
            raise ConfigError(f"ids: zipf exponent {self.exponent} is not in (0, {MAX_ZIPF_EXPONENT:g}]")

    @property
    def name(self) -> str:
        """Write it as `zipf:1.05`."""
        return f"zipf:{self.exponent:g}"

    def ranks(self, rng: np.random.Generator, num_rows: Int64Array) -> Int64Array:
        """Draw ranks."""
        drawn = np.empty(num_rows.size, np.int64)
        last = self._integral(num_rows.astype(np.float64) + 0.5)
        first = float(self._integral(np.array(1.5))) - 1.0
        left = np.arange(num_rows.size)
        while left.size:
            area = last[left] + rng.random(left.size) * (first - last[left])
            x = self._inverse(area)
            k = np.clip(np.floor(x + 0.5), 1.0, num_rows[left])
            accepted = area >= self._integral(k + 0.5) - k**-self.exponent
            drawn[left[accepted]] = k[accepted].astype(np.int64) - 1
            left = left[~accepted]
        return drawn

    def _integral(self, x: Float64Array) -> Float64Array:
        """H, the integral of h(x) = x^-exponent, with H(1) = 0."""
        log_x = np.log(x)
        power = (1.0 - self.exponent) * log_x
        # expm1(p) / p is 1 at p = 0, which is where the exponent is 1.
        growth = np.divide(np.expm1(power), power, out=np.ones_like(power), where=power != 0)
        return growth * log_x

    def _inverse(self, area: Float64Array) -> Float64Array:
        """Return the x whose integral is `area`."""
        # Rounding may put it below -1, the limit for an infinite x.
        scaled = np.maximum((1.0 - self.exponent) * area, -1.0)
        with np.errstate(divide="ignore"):
            factor = np.divide(np.log1p(scaled), scaled, out=np.ones_like(scaled), where=scaled != 0)
        return np.exp(factor * area)


class RowScatter:
    """Which row of a table has which rank: popular rows lie all over the table, not side by side on its first pages.

    rank * multiplier + offset mod num_rows, with a multiplier near num_rows / golden ratio that is prime to num_rows:
    each row has one rank, and any first few ranks lie far apart. All arrays are int64 [tables]; rows are below 2^32.
    """

    def __init__(self, num_rows: Int64Array) -> None:
        golden, multipliers = (math.sqrt(5) - 1) / 2, []
        for rows in num_rows.tolist():
            near = max(1, round(rows * golden))
            multipliers.append(next(number for number in itertools.count(near) if math.gcd(number, rows) == 1))
        self.num_rows, self.multipliers, self.offsets = num_rows, np.array(multipliers, np.int64), num_rows // 3

    def rows(self, ranks: Int64Array, table: npt.NDArray[np.integer]) -> Int64Array:
        """Find the rows, int64 [n], of ranks int64 [n] in tables [n]."""
        # A product of two numbers below 2^32 may pass 2^63, but not 2^64.
        product = ranks.astype(np.uint64) * self.multipliers.astype(np.uint64)[table]
        num_rows = self.num_rows[table]
        shifted = (product % num_rows.astype(np.uint64)).astype(np.int64) + self.offsets[table]
        rows: Int64Array = shifted % num_rows
        return rows


IdDistribution: TypeAlias = Uniform | Zipf


def parse_hotness(texts: Iterable[str], spec: ModelSpec) -> dict[str, int]:
    """Read `N`, ids a bag of all features, or `FEATURE=N`, each above those before it. Raises ConfigError."""
    hotness, features = dict[str, int](), [feature.name for feature in spec.features]
    for text in texts:
        name, equals, number = text.rpartition("=")
        if not (number.isascii() and number.isdigit() and 1 <= int(number[:5]) <= MAX_HOTNESS):
            raise ConfigError(f"hotness: {number!r} is not a whole number of ids from 1 to {MAX_HOTNESS}")
        if equals and name not in features:
            raise ConfigError(f"hotness: {text!r}: no feature {name!r}; there are {nearest(name, features)}")
        hotness |= dict.fromkeys([name] if equals else features, int(number))
    return hotness


def parse_ids(text: str) -> IdDistribution:
    """Read `uniform` or `zipf:S` (or `zipf(S)`). Raises ConfigError."""
    if text == "uniform":
        return Uniform()
    if match := _ZIPF.fullmatch(text):
        return Zipf(float(match[1]))
    raise ConfigError(f"ids: {text!r} is not uniform, or zipf:S with S in (0, {MAX_ZIPF_EXPONENT:g}]")


@dataclass(frozen=True, slots=True, eq=False)
class FeatureBags:
    """One feature's part of a request: int64 values [n] bag by bag, int64 lengths [bags] and float32 weights [n].

    Weights may all be 1 (None); `texts` are the strings behind the values, if ids are strings.
    """

    name: str
    is_context: bool
    values: Int64Array
    lengths: Int64Array
    weights: Float32Array | None
    texts: Sequence[str] | None

    @property
    def ids(self) -> Int64Array | Sequence[str]:
        """The texts, or else the values."""
        return self.values if self.texts is None else self.texts


def features_of(schema: FeatureSchema, request: RankRequest) -> Iterator[FeatureBags]:
    """Go through the features of a request one by one, for formats that name each."""
    bags, texts = request.bags, iter(request.texts)
    starts = bags.value_starts()[1:-1]
    values, lengths = np.split(bags.values, starts), np.split(bags.lengths, bags.bag_starts()[1:-1])
    weights = [None] * len(values) if bags.weights is None else np.split(bags.weights, starts)
    for feature, ids, counts, weighted in zip(schema.features, values, lengths, weights, strict=True):
        yield FeatureBags(
            name=feature.name,
            is_context=feature.side == "context",
            values=ids,
            lengths=counts,
            weights=weighted if feature.weighted else None,
            texts=list(itertools.islice(texts, ids.size)) if feature.name in schema.string_features else None,
        )


def scattered_ids(rows: Int64Array) -> Int64Array:
    """Return ids from 0 to 2^63 - 1 that name rows, int64 [n], where numbers do not."""
    return rows * ID_FACTOR & np.iinfo(np.int64).max


COUNTED_CANDIDATES = 1 << 22


class Workload:
    """Drawn requests to one model. Features that share a table share its popular rows; dense inputs are normal.

    Its name says everything that was chosen; bags are in the order of the schema.

    Ids are numbers of rows, texts of these, or `scattered_ids`; weights are from 0 to 1. Bags have as many as the
    hotness of their feature. Ragged ones have drawn lengths: around a hotness h above 1, each of 1 to 2h - 1 alike;
    around 1, an eighth of the bags is empty, as many have two ids, all others one.
    """

    def __init__(
        self,
        name: str,
        spec: ModelSpec,
        hotness: Mapping[str, int],
        ids: IdDistribution,
        candidates: CandidateCounts,
        *,
        ragged: bool,
        scattered: bool = False,
    ) -> None:
        self.name = name
        self.spec = spec
        self.schema = FeatureSchema.of(spec)
        self._hotness = np.array([hotness[feature.name] for feature in self.schema.features], np.int64)
        self._ids, self._candidates, self._ragged, self._scattered = ids, candidates, ragged, scattered
        self._is_string = np.array([feature.name in self.schema.string_features for feature in self.schema.features])
        self._is_weighted = np.array([feature.weighted for feature in self.schema.features])
        self._scatter = RowScatter(np.array([table.num_embeddings for table in self.schema.layout.tables], np.int64))

    def access_counts(self, candidates: int = COUNTED_CANDIDATES) -> dict[str, npt.NDArray[np.uint32]]:
        """Return how often so many candidates look up each row, in the mean, uint32 [num_embeddings], if not alike."""
        if not isinstance(self._ids, Zipf):
            return {}
        counts: dict[str, npt.NDArray[np.uint32]] = {}
        for number, table in enumerate(self.schema.layout.tables):
            lookups = candidates * int(self._hotness[self.schema.table_index == number].sum())
            first = lookups / float(power_law_sums(np.array([table.num_embeddings]), self._ids.exponent)[0])
            ranks = np.arange(min(table.num_embeddings, int(first ** (1 / self._ids.exponent))))
            counts[table.name] = np.zeros(table.num_embeddings, np.uint32)
            rows = self._scatter.rows(ranks, np.full(ranks.size, number))
            counts[table.name][rows] = first * (ranks + 1.0) ** -self._ids.exponent
        return counts

    def request(self, rng: np.random.Generator) -> RankRequest:
        """Draw one more request; the same one for a generator in the same state."""
        schema, dense_inputs = self.schema, self.spec.dense_inputs
        num_candidates = self._candidates.draw(rng)
        bags_per_key = np.where(schema.is_context, 1, num_candidates).astype(np.int64)
        lengths = np.repeat(self._hotness, bags_per_key)
        if self._ragged:
            around, eighth = rng.integers(1, 2 * lengths), rng.integers(0, 8, lengths.size)
            lengths = np.where(lengths > 1, around, 1 + (eighth == 7) - (eighth == 0))
        table = np.repeat(np.repeat(schema.table_index, bags_per_key), lengths)
        values: Int64Array = self._scatter.rows(self._ids.ranks(rng, self._scatter.num_rows[table]), table)
        values = scattered_ids(values) if self._scattered else values
        bags = Bags.from_lengths(np.arange(bags_per_key.size, dtype=np.int32), bags_per_key, lengths, values)
        counts = bags.values_per_key()
        if self._is_weighted.any():
            weights = np.where(np.repeat(self._is_weighted, counts), rng.random(values.size, np.float32), np.float32(1))
            bags = bags.with_values(values, weights)
        return RankRequest(
            bags=bags,
            texts=[str(value) for value in values[np.repeat(self._is_string, counts)].tolist()],
            num_candidates=num_candidates,
            context_dense=rng.standard_normal(dense_inputs.context, dtype=np.float32),
            candidate_dense=rng.standard_normal((num_candidates, dense_inputs.candidate), dtype=np.float32),
            timeout_s=math.inf,
        )
