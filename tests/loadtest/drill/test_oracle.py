"""The oracle's rows and questions, and the judge of answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from loader.snapshot.codecs import RowCodec
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.reader import verify_snapshot
from loadtest.drill.config import OracleShape
from loadtest.drill.oracle import (
    FACTORS,
    FEATURE_WEIGHTS,
    LOGIT_SCALE,
    SCORE_TOLERANCE,
    STAMPS,
    Question,
    ids_of,
    judge,
    letter_of,
    make_questions,
    oracle_spec,
    rows_in,
    sigmoid,
    version_rows,
    write_oracle,
)
from serving.embedded import Ranker

SPEC = oracle_spec(OracleShape(items=700, users=300, tags=50))
KEYED_SPEC = oracle_spec(OracleShape(items=700, users=301, tags=53, keyed=True))
DIM = SPEC.tables[0].embedding_dim
QUESTIONS = make_questions(SPEC, 30)
rank_questions = st.sampled_from(QUESTIONS["rank"])
lookup_questions = st.sampled_from(QUESTIONS["lookup"])
all_questions = st.one_of(rank_questions, lookup_questions)
versions = st.integers(1, 1000)
SMALLEST_SHIFT = 0.0028
"""What the oracle's docstring promises, less the rounding of float32."""


@pytest.mark.parametrize("version", [1, 2])
def test_every_row_survives_its_row_format_exactly(version: int):
    """Dimension 0 has the version's factor, and no two rows are equal, so that a wrong row shows."""
    factor = FACTORS[letter_of(version)]
    for table in SPEC.tables:
        rows = version_rows(table, version, np.arange(table.num_embeddings))
        codec = RowCodec(table.dtype, table.embedding_dim)
        np.testing.assert_array_equal(codec.decode(codec.encode(rows)), rows)
        assert (rows[:, 0] == factor).all()
        assert (rows[:, 1:] >= factor).all()
        assert len(np.unique(rows, axis=0)) == len(rows)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("spec", [SPEC, KEYED_SPEC], ids=["rows", "keys"])
def test_a_served_oracle_answers_what_its_questions_expect(tmp_path: Path, spec: ModelSpec, version: int):
    folder = write_oracle(spec, tmp_path, version)
    assert verify_snapshot(folder).ok
    questions = make_questions(spec, 40, seed=version)
    with Ranker.open(folder, cards=4, dtype="float32") as ranker:
        for question in questions["rank"] + questions["lookup"]:
            if question.method == "rank":
                sides = dict(zip(("context", "candidates"), question.sides(), strict=True))
                answer = ranker.rank(SPEC.model, **sides)
                values = answer.scores
            else:
                answer = ranker.lookup(SPEC.model, question.bags)
                values = np.concatenate([answer.embeddings[name].reshape(-1) for name in question.bags])
            assert judge(question, answer.version, values) is None
            kind, message, _ = judge(question, version + 1, values)
            assert kind == "mixed"
            assert f"names version {version + 1} " in message


def test_keys_of_a_keyed_oracle_have_any_sign_and_one_in_17_is_not_there():
    questions = make_questions(KEYED_SPEC, 200)["rank"]
    assert [rows_in(table) for table in KEYED_SPEC.tables] == [700, 301, 53]
    present = {
        feature: set(ids_of(table, np.arange(rows_in(table))).tolist())
        for table in KEYED_SPEC.tables
        for feature in table.feature_names
    }
    asked = [(name, key) for each in questions for name, bags in each.bags.items() for bag in bags for key in bag]
    counts = sum(int(question.counts[:, 3:].sum() + question.counts[0, :3].sum()) for question in questions)
    assert counts == sum(key in present[name] for name, key in asked)
    assert 1 / 20 < 1 - counts / len(asked) < 1 / 14
    assert 0.4 < sum(key < 0 for _, key in asked) / len(asked) < 0.6


def draw_from_b(data: st.DataObject, question: Question) -> np.ndarray:
    """How many ids of each bag come from B, 0 to all of them, each bag for itself."""
    flat = [data.draw(st.integers(0, int(count))) for count in question.counts.reshape(-1)]
    return np.array(flat, np.int64).reshape(question.counts.shape)


@given(st.data(), rank_questions, versions)
def test_scores_of_any_mixture_are_mixed(data: st.DataObject, question: Question, version: int):
    """Of rows and dense models. Each wrong score is hundreds of tolerances away."""
    letter, from_b = letter_of(version), draw_from_b(data, question)
    dense = np.array(data.draw(st.lists(st.integers(0, 1), min_size=len(from_b), max_size=len(from_b))))
    is_right = (dense == letter) & (from_b == letter * question.counts).all(axis=1)
    assume(not is_right.all())
    first_dims = question.counts + (FACTORS[1] - 1) * from_b
    logits = first_dims @ FEATURE_WEIGHTS / LOGIT_SCALE / FACTORS[dense] + np.array(STAMPS)[dense]
    scores = sigmoid(logits).astype(np.float32)
    assert judge(question, version, scores).kind == "mixed"
    shift = np.abs(scores - question.expected[letter])
    assert (shift[~is_right] > SMALLEST_SHIFT).all()
    assert (shift[is_right] <= SCORE_TOLERANCE).all()


@given(st.data(), lookup_questions, versions)
def test_vectors_of_any_mixture_are_mixed(data: st.DataObject, question: Question, version: int):
    """Which ids of a bag have B's row is seen in dimension 0 alone."""
    from_b = draw_from_b(data, question)
    assume((from_b != letter_of(version) * question.counts).any())
    values = question.expected[0].copy()
    values[::DIM] += (FACTORS[1] - 1) * from_b
    assert judge(question, version, values).kind == "mixed"


@given(st.data(), lookup_questions, versions, st.booleans())
def test_a_missing_or_another_row_is_wrong(data: st.DataObject, question: Question, version: int, is_missing: bool):
    """Another row has the right dimension 0."""
    values, factor = question.expected[letter_of(version)].copy(), FACTORS[letter_of(version)]
    bag = data.draw(st.integers(0, len(question.counts) - 1))
    place = DIM * bag + (0 if is_missing else data.draw(st.integers(1, DIM - 1)))
    values[place] += -factor if is_missing else factor
    assert judge(question, version, values).kind == "wrong"


@given(st.data(), all_questions, versions)
def test_values_that_no_mixture_gives_are_wrong(data: st.DataObject, question: Question, version: int):
    """No number, or below any score of B's dense model without a single row, which is the lowest that there is."""
    values = question.expected[letter_of(version)].copy()
    values[data.draw(st.integers(0, values.size - 1))] = data.draw(st.sampled_from([np.nan, 0.25]))
    assert judge(question, version, values).kind == "wrong"


@given(all_questions, versions)
def test_another_length_or_no_version_is_wrong(question: Question, version: int):
    values = question.expected[letter_of(version)]
    assert judge(question, version, values[:-1]).kind == "wrong"
    assert judge(question, 0, values).kind == "wrong"
