"""Hashed tables from a row for each id down to a row for a hundred: lookups in a collision, and what they cost.

On a file of the Criteo display-advertising challenge, collisions are counted. On clicks that are made up by a known
teacher, with ids that follow Zipf's law, a factorization machine (Rendle, "Factorization Machines", 2010) learns from
them in one pass, as large ad models do, and its log loss on clicks that it has not seen is told beside the teacher's.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loader.snapshot.tables import Frozen, HashMapping
from loadtest.errors import LeversError
from router.id_mapping import hashed_rows

SHARES: Final = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
"""Rows of a hashed table as shares of the ids that occur."""
CRITEO_COLUMNS: Final = tuple(f"C{number}" for number in range(1, 27))
CRITEO_DIM: Final = 16
_FLOAT_BYTES = 4
_MAPPING = HashMapping(salt="per_feature")
Int64Array = npt.NDArray[np.int64]


class Collisions(Frozen):
    """Lookups of a trace in hashed tables, as shares of all.

    Attributes:
        changed, expected: of ids that share their row with another id of the trace, measured and as expected at random.
        outnumbered: of ids that are not the most frequent one of their row.
    """

    share: float
    rows: int
    bytes: int
    ids: int
    lookups: int
    changed: float
    expected: float
    outnumbered: float


class LossAtSize(Frozen):
    """Log loss on clicks that were not learnt from; `share` None: a row for each id, without a hash."""

    share: float | None
    rows: int
    bytes: int
    log_loss: float


class TeacherReport(Frozen):
    """The made-up clicks: `teacher` and `constant` are the log losses of the truth, and of the mean click rate."""

    clicks: int
    seed: int
    vocabularies: tuple[int, ...]
    zipf: float
    ids: tuple[int, ...]
    teacher: float
    constant: float
    sizes: tuple[LossAtSize, ...]


class HashSizesReport(Frozen):
    """Both parts; a part that was not asked for is None."""

    criteo: tuple[Collisions, ...] | None
    clicks: TeacherReport | None


def hashed(feature: str, ids: Int64Array, num_embeddings: int) -> Int64Array:
    """Map a feature's ids to rows as a router does, with a salt of its own."""
    seed = np.array([_MAPPING.seed_of(feature)], np.uint64)
    return hashed_rows(ids, seed, np.array([num_embeddings], np.uint64))


def read_criteo(path: Path) -> dict[str, tuple[Int64Array, Int64Array]]:
    """Read the categorical columns: by column the ids int64 [n], all different, and how often each comes.

    Raises:
        LeversError: the file can't be read, has no such columns, or a value that is not hexadecimal.
    """
    try:
        with path.open(newline="", encoding="ascii") as file:
            lines = list(csv.DictReader(file))
    except (OSError, ValueError) as error:
        raise LeversError(f"{path}: {error}") from error
    if not lines or (missing := [name for name in CRITEO_COLUMNS if name not in lines[0]]):
        raise LeversError(f"{path}: no lines, or no columns {CRITEO_COLUMNS if not lines else missing}")
    found = {}
    for name in CRITEO_COLUMNS:
        try:
            ids = np.array([int(line[name], 16) for line in lines if line[name]], np.int64)
        except (ValueError, OverflowError) as error:
            raise LeversError(f"{path}: {name}: {error}") from error
        found[name] = np.unique(ids, return_counts=True)
    return found


def count_collisions(columns: dict[str, tuple[Int64Array, Int64Array]], share: float) -> Collisions:
    """Count lookups in a collision, each column in a hashed table of so many rows for each of its ids."""
    changed = expected = most = 0.0
    rows = num_ids = lookups = 0
    for name, (ids, counts) in columns.items():
        size = max(1, round(share * ids.size))
        found = hashed(name, ids, size)
        is_shared = np.bincount(found, minlength=size)[found] > 1
        changed += float(counts[is_shared].sum())
        frequent = np.zeros(size)
        np.maximum.at(frequent, found, counts)
        most += float(frequent.sum())
        # The chance that none of the others is in the same row.
        expected += float(counts.sum()) * (1 - (1 - 1 / size) ** (ids.size - 1))
        rows, num_ids, lookups = rows + size, num_ids + ids.size, lookups + int(counts.sum())
    size_bytes = rows * CRITEO_DIM * _FLOAT_BYTES
    return Collisions(
        share=share,
        rows=rows,
        bytes=size_bytes,
        ids=num_ids,
        lookups=lookups,
        changed=changed / lookups,
        expected=expected / lookups,
        outnumbered=1 - most / lookups,
    )


VOCABULARIES: Final = (1_000_000, 300_000, 100_000, 1_000_000)
"""Ids that each feature of the made-up clicks may have."""
ZIPF: Final = 1.05
_CLICK_RATE_LOGIT = -1.0
_BIAS_SCALE = 0.7
_TEACHER_DIM = 4
DIM: Final = 8
_BATCH = 4096
_RATE = 0.08
_TEST_SHARE = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class Clicks:
    """Clicks in the order of time: ids int64 [features, clicks], labels float32 [clicks], the teacher's chances."""

    ids: Int64Array
    labels: npt.NDArray[np.float32]
    chances: npt.NDArray[np.float64]

    @classmethod
    def of_teacher(cls, count: int, seed: int, vocabularies: Sequence[int]) -> Clicks:
        """Draw them. The teacher adds a number for each id, and the product of vectors of the first two features."""
        draw = np.random.default_rng(seed)
        logits, ids, vectors = np.full(count, _CLICK_RATE_LOGIT), np.empty((len(vocabularies), count), np.int64), []
        for number, size in enumerate(vocabularies):
            weights = np.cumsum(np.arange(1, size + 1) ** -ZIPF)
            ids[number] = np.searchsorted(weights, draw.random(count) * weights[-1])
            logits += (_BIAS_SCALE * draw.standard_normal(size))[ids[number]]
            if number < 2:
                vectors.append(draw.standard_normal((size, _TEACHER_DIM)).astype(np.float32)[ids[number]])
        logits += np.einsum("nd,nd->n", *vectors) * _BIAS_SCALE / np.sqrt(_TEACHER_DIM)
        chances = 1 / (1 + np.exp(-logits))
        return cls(ids, (draw.random(count) < chances).astype(np.float32), chances)

    @property
    def num_learnt(self) -> int:
        """Count the clicks to learn from: all but the last tenth."""
        return self.labels.size - round(self.labels.size * _TEST_SHARE)


def log_loss(labels: npt.NDArray[np.float32], chances: npt.NDArray[np.float64]) -> float:
    """Return the mean of -log of the chance that was given to what happened, in nats."""
    return float(-np.log(np.where(labels > 0, chances, 1 - chances)).mean())


class FactorizationMachine:
    """logit = b + sum of w_f + sum of <v_f, v_g> for f < g; a row is `[w | v]`. Learns by Adagrad, batch by batch."""

    def __init__(self, num_rows: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.zeros(num_rows, 1 + DIM)
        self.rows[:, 1:] = torch.randn(num_rows, DIM, generator=generator) * 0.02
        self.squares = torch.full_like(self.rows, 0.1)
        self.bias = _CLICK_RATE_LOGIT

    def logits(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute logits [n] of rows int64 [n, features]; also what was read, and the sum of the vectors."""
        own = self.rows.index_select(0, rows.flatten()).view(*rows.shape, 1 + DIM)
        vectors = own[:, :, 1:]
        total = vectors.sum(1)
        products = 0.5 * (total.square().sum(1) - vectors.square().sum((1, 2)))
        return self.bias + own[:, :, 0].sum(1) + products, own, total

    def learn(self, rows: Tensor, labels: Tensor) -> None:
        """Take one step: Adagrad's, by the sum of the gradients of each row."""
        logits, own, total = self.logits(rows)
        error = torch.sigmoid(logits) - labels
        gradient = torch.empty_like(own)
        gradient[:, :, 0] = error[:, None]
        gradient[:, :, 1:] = error[:, None, None] * (total[:, None, :] - own[:, :, 1:])
        at, inverse = torch.unique(rows, return_inverse=True)
        summed = torch.zeros(at.numel(), 1 + DIM).index_add_(0, inverse.flatten(), gradient.flatten(0, 1))
        squares = self.squares.index_select(0, at) + summed.square()
        self.squares.index_copy_(0, at, squares)
        self.rows.index_add_(0, at, summed / squares.sqrt(), alpha=-_RATE)
        self.bias -= _RATE * 0.1 * float(error.mean())


def measure_loss(clicks: Clicks, rows: Int64Array, num_rows: int, seed: int) -> float:
    """Learn from all but the last tenth in one pass, with rows int64 [features, clicks]; the log loss on that tenth."""
    of_click, labels = torch.from_numpy(np.ascontiguousarray(rows.T)), torch.from_numpy(clicks.labels)
    model, end = FactorizationMachine(num_rows, seed), clicks.num_learnt
    with torch.inference_mode():
        for first in range(0, end, _BATCH):
            own = slice(first, min(first + _BATCH, end))
            model.learn(of_click[own], labels[own])
        unseen = torch.split(of_click[end:], _BATCH)
        chances = torch.cat([torch.sigmoid(model.logits(part)[0].double()) for part in unseen])
    return log_loss(clicks.labels[end:], chances.numpy())


def measure_clicks(count: int, seed: int, told: Callable[[LossAtSize], None] = lambda one: None) -> TeacherReport:
    """Make clicks, and learn from them with hashed tables of every size."""
    torch.set_num_threads(1)
    # Of a small try, most ids would never come.
    vocabularies = tuple(min(size, count) for size in VOCABULARIES)
    clicks = Clicks.of_teacher(count, seed, vocabularies)
    end = clicks.num_learnt
    ids = [np.unique(own[:end]).size for own in clicks.ids]
    sizes: list[LossAtSize] = []
    for share in (None, *SHARES):
        widths = vocabularies if share is None else tuple(max(1, round(share * one)) for one in ids)
        rows = np.empty_like(clicks.ids)
        first = 0
        for number, (own, width) in enumerate(zip(clicks.ids, widths, strict=True)):
            rows[number] = first + (own if share is None else hashed(f"f{number}", own, width))
            first += width
        # Without a hash, only rows of ids that occur are ever learnt: no others are counted.
        kept = sum(ids) if share is None else first
        loss = measure_loss(clicks, rows, first, seed)
        sizes.append(LossAtSize(share=share, rows=kept, bytes=kept * (1 + DIM) * _FLOAT_BYTES, log_loss=loss))
        told(sizes[-1])
    seen = clicks.labels[end:]
    constant = np.full(seen.size, float(clicks.labels[:end].mean()))
    return TeacherReport(
        clicks=count,
        seed=seed,
        vocabularies=vocabularies,
        zipf=ZIPF,
        ids=tuple(ids),
        teacher=log_loss(seen, clicks.chances[end:]),
        constant=log_loss(seen, constant),
        sizes=tuple(sizes),
    )
