"""Is an answer that of one version, and of the version that it names? Pure functions of a question and an answer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from loadtest.drill.oracle import (
    FACTORS,
    FEATURE_WEIGHTS,
    LOGIT_SCALE,
    SCORE_TOLERANCE,
    STAMPS,
    Float32Array,
    Int64Array,
    letter_of,
    sigmoid,
)
from loadtest.drill.questions import Question


class Kind(IntEnum):
    """What an answer is.

    `OK`: exactly that of the version that it names. `FAILED`: there is none (an error, a broken connection, nothing
    within the deadline, or nothing that can be read). `MIXED`: made of parts of A and of B, or of one while it names
    the other. `WRONG`: anything else.
    """

    OK = 0
    FAILED = 1
    MIXED = 2
    WRONG = 3


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an answer is, and why if it is not right."""

    kind: Kind
    detail: str = ""


OK = Verdict(Kind.OK)


def judge(question: Question, version: int, values: Float32Array) -> Verdict:
    """Judges an answer.

    Args:
        question: what was asked.
        version: that the answer names.
        values: float32 [n], its scores, or its vectors in the order of `question.features`, one after the other.
    """
    expected = question.expected
    if version < 1 or values.shape != expected.shape[1:]:
        return Verdict(Kind.WRONG, f"version {version} with {values.size} values, expected {expected.shape[1]}")
    letter = letter_of(version)
    # A NaN is not within any tolerance.
    if question.method == "lookup":
        right = values == expected[letter]
    else:
        right = np.abs(values - expected[letter]) <= SCORE_TOLERANCE
    if right.all():
        return OK
    is_mixed = (
        _is_mixed_lookup(question, letter, values)
        if question.method == "lookup"
        else _is_mixed_rank(question, values, right)
    )
    return Verdict(Kind.MIXED if is_mixed else Kind.WRONG, _difference(question, version, letter, values, right))


def _is_mixed_lookup(question: Question, letter: int, values: Float32Array) -> bool:
    """Whether each bag of n ids has a + 1024 b in dimension 0 with a + b = n, and not all b are the named version's."""
    first = values.reshape(-1, question.embedding_dim)[:, 0].astype(np.float64)
    from_b = (first - question.counts) / float(FACTORS[1] - FACTORS[0])
    possible = (from_b == np.floor(from_b)) & (from_b >= 0) & (from_b <= question.counts)
    return bool(possible.all() and (from_b != letter * question.counts).any())


def _is_mixed_rank(question: Question, values: Float32Array, right: np.ndarray) -> bool:
    """Whether each score that is not right comes from a dense model and embeddings of different versions."""
    return all(
        bool((np.abs(_mixtures(question.counts[candidate]) - values[candidate]) <= SCORE_TOLERANCE).any())
        for candidate in np.flatnonzero(~right).tolist()
    )


def _mixtures(counts: Int64Array) -> np.ndarray:
    """All scores that a candidate can get if each id's row, and the dense model, are of A or of B.

    Args:
        counts: int64 [F], its ids per feature.
    """
    # The logit depends on sum_f w_f b_f alone, so different choices of the b_f fall together: at most a few hundred.
    reached = np.zeros(1)
    for count, weight in zip(counts.tolist(), FEATURE_WEIGHTS.tolist(), strict=True):
        reached = np.unique(reached[:, None] + weight * np.arange(count + 1))
    embeddings = counts @ FEATURE_WEIGHTS + float(FACTORS[1] - FACTORS[0]) * reached
    dense_a = embeddings / LOGIT_SCALE + STAMPS[0]
    dense_b = embeddings / (LOGIT_SCALE * float(FACTORS[1])) + STAMPS[1]
    return sigmoid(np.concatenate([dense_a, dense_b]))


def _difference(question: Question, version: int, letter: int, values: Float32Array, right: np.ndarray) -> str:
    place = int(np.argmin(right))
    a, b = question.expected[:, place].tolist()
    return (
        f"{question.method}: names version {version} ({'AB'[letter]}), but value {place} of {values.size} is "
        f"{values[place]!r}; A has {a!r}, B has {b!r}; {int((~right).sum())} values differ"
    )
