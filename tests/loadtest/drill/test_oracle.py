from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from loader.snapshot.codecs import codec_for
from loader.snapshot.reader import verify_snapshot
from loadtest.drill.config import OracleShape
from loadtest.drill.oracle import (
    FACTORS,
    Kind,
    judge,
    letter_of,
    make_questions,
    oracle_spec,
    version_rows,
    write_oracle,
)
from serving.embedded import Ranker

SMALL = OracleShape(items=700, users=300, tags=50)


@pytest.mark.parametrize("version", [1, 2])
def test_every_row_survives_its_row_format_exactly(version: int):
    """Dimension 0 has the version's factor."""
    spec = oracle_spec(SMALL)
    for table in spec.tables:
        rows = version_rows(table, version, np.arange(table.num_embeddings))
        codec = codec_for(table.dtype, table.embedding_dim)
        np.testing.assert_array_equal(codec.decode(codec.encode(rows)), rows)
        np.testing.assert_array_equal(rows[:, 0], FACTORS[letter_of(version)])
        assert (rows[:, 1:] >= FACTORS[letter_of(version)]).all()


def test_rows_of_a_table_differ_so_that_a_wrong_row_shows():
    items = oracle_spec(SMALL).tables[0]
    rows = version_rows(items, 1, np.arange(items.num_embeddings))
    assert len(np.unique(rows, axis=0)) == len(rows)


def test_odd_versions_are_a_and_even_ones_b():
    assert [letter_of(version) for version in (1, 2, 3, 100)] == [0, 1, 0, 1]


@pytest.mark.parametrize("version", [1, 2])
def test_a_served_oracle_answers_what_its_questions_expect(tmp_path: Path, version: int):
    folder = write_oracle(oracle_spec(SMALL), tmp_path, version)
    assert verify_snapshot(folder).ok
    questions = make_questions(oracle_spec(SMALL), 40, seed=version)
    with Ranker.open(folder, shards=2, cards=2, dtype="float32") as ranker:
        for question in questions["rank"]:
            sides = {"context": question.side("context"), "candidates": question.side("candidate")}
            answer = ranker.rank({part: {"sparse": ids} for part, ids in sides.items()})
            scores = np.array(answer["scores"], np.float32)
            assert judge(question, answer["version"], scores).kind is Kind.OK
            assert judge(question, answer["version"] + 1, scores).kind is Kind.MIXED
        for question in questions["lookup"]:
            answer = ranker.lookup({"sparse": question.bags})
            vectors = [np.array(answer["embeddings"][name], np.float32).reshape(-1) for name in question.bags]
            assert judge(question, answer["version"], np.concatenate(vectors)).kind is Kind.OK
            assert judge(question, answer["version"] + 1, np.concatenate(vectors)).kind is Kind.MIXED
