from __future__ import annotations

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from loadtest.drill.config import OracleShape
from loadtest.drill.oracle import (
    FACTORS,
    FEATURE_WEIGHTS,
    LOGIT_SCALE,
    SCORE_TOLERANCE,
    STAMPS,
    Kind,
    Question,
    judge,
    letter_of,
    make_questions,
    oracle_spec,
    sigmoid,
)

SHAPE = OracleShape(items=500, users=500, tags=100)
QUESTIONS = make_questions(oracle_spec(SHAPE), 30)
rank_questions = st.sampled_from(QUESTIONS["rank"])
lookup_questions = st.sampled_from(QUESTIONS["lookup"])
versions = st.integers(1, 1000)
SMALLEST_SHIFT = 0.0028
"""What the oracle's docstring promises, less the rounding of float32."""


def from_b_of(data: st.DataObject, counts: np.ndarray) -> np.ndarray:
    """How many ids of each bag come from B, 0 to all of them, each bag for itself."""
    flat = [data.draw(st.integers(0, int(count))) for count in counts.reshape(-1)]
    return np.array(flat, np.int64).reshape(counts.shape)


def scores_of(counts: np.ndarray, from_b: np.ndarray, dense: np.ndarray) -> np.ndarray:
    """float32 [N] by the formula, from ids per candidate and feature, those of them from B, and each dense model."""
    first_dims = counts + (FACTORS[1] - 1) * from_b
    logit = first_dims @ FEATURE_WEIGHTS / LOGIT_SCALE / FACTORS[dense] + np.array(STAMPS)[dense]
    return sigmoid(logit).astype(np.float32)


def vectors_of(question: Question, from_b: np.ndarray) -> np.ndarray:
    """A lookup's answer in which some ids of each bag have B's row. Which ones is seen in dimension 0 alone."""
    vectors = question.expected[0].reshape(-1, SHAPE.embedding_dim).copy()
    vectors[:, 0] += (FACTORS[1] - 1) * from_b
    return vectors.reshape(-1)


@given(rank_questions, versions)
def test_scores_of_the_version_that_is_named_are_ok(question: Question, version: int):
    assert judge(question, version, question.expected[letter_of(version)]).kind is Kind.OK


@given(lookup_questions, versions)
def test_vectors_of_the_version_that_is_named_are_ok(question: Question, version: int):
    assert judge(question, version, question.expected[letter_of(version)]).kind is Kind.OK


@given(st.one_of(rank_questions, lookup_questions), versions)
def test_an_answer_of_one_version_that_names_the_other_is_mixed(question: Question, version: int):
    verdict = judge(question, version, question.expected[1 - letter_of(version)])
    assert verdict.kind is Kind.MIXED
    assert f"names version {version} " in verdict.detail


@given(st.data(), rank_questions, versions)
def test_scores_from_any_mixture_of_rows_and_dense_models_are_mixed(
    data: st.DataObject, question: Question, version: int
):
    from_b = from_b_of(data, question.counts)
    dense = np.array(data.draw(st.lists(st.integers(0, 1), min_size=len(from_b), max_size=len(from_b))))
    letter = letter_of(version)
    is_right = (dense == letter) & (from_b == letter * question.counts).all(axis=1)
    assume(not is_right.all())
    scores = scores_of(question.counts, from_b, dense)
    assert judge(question, version, scores).kind is Kind.MIXED
    # Not by a hair: each wrong score is hundreds of tolerances away.
    shift = np.abs(scores - question.expected[letter])
    assert (shift[~is_right] > SMALLEST_SHIFT).all()
    assert (shift[is_right] <= SCORE_TOLERANCE).all()


@given(st.data(), lookup_questions, versions)
def test_vectors_from_any_mixture_of_rows_are_mixed(data: st.DataObject, question: Question, version: int):
    from_b = from_b_of(data, question.counts)
    assume((from_b != letter_of(version) * question.counts).any())
    assert judge(question, version, vectors_of(question, from_b)).kind is Kind.MIXED


@given(st.data(), lookup_questions, versions)
def test_a_bag_of_which_one_id_is_missing_is_wrong(data: st.DataObject, question: Question, version: int):
    letter = letter_of(version)
    vectors = question.expected[letter].reshape(-1, SHAPE.embedding_dim).copy()
    vectors[data.draw(st.integers(0, len(vectors) - 1)), 0] -= FACTORS[letter]
    assert judge(question, version, vectors.reshape(-1)).kind is Kind.WRONG


@given(st.data(), lookup_questions, versions)
def test_another_row_with_the_right_first_dimension_is_wrong(data: st.DataObject, question: Question, version: int):
    values = question.expected[letter_of(version)].copy()
    place = data.draw(st.integers(0, values.size - 1).filter(lambda one: one % SHAPE.embedding_dim != 0))
    values[place] += FACTORS[letter_of(version)]
    assert judge(question, version, values).kind is Kind.WRONG


@given(st.data(), st.one_of(rank_questions, lookup_questions), versions)
def test_a_value_that_is_not_a_number_is_wrong(data: st.DataObject, question: Question, version: int):
    values = question.expected[letter_of(version)].copy()
    values[data.draw(st.integers(0, values.size - 1))] = np.nan
    assert judge(question, version, values).kind is Kind.WRONG


@given(st.one_of(rank_questions, lookup_questions), versions)
def test_an_answer_of_another_length_or_without_a_version_is_wrong(question: Question, version: int):
    values = question.expected[letter_of(version)]
    assert judge(question, version, values[:-1]).kind is Kind.WRONG
    assert judge(question, 0, values).kind is Kind.WRONG


@given(st.data(), rank_questions, versions)
def test_a_score_that_no_mixture_gives_is_wrong(data: st.DataObject, question: Question, version: int):
    values = question.expected[letter_of(version)].copy()
    # Below any score of B's dense model without a single row, which is the lowest that there is.
    values[data.draw(st.integers(0, values.size - 1))] = 0.25
    assert judge(question, version, values).kind is Kind.WRONG
