"""Tables that are described with less than a row of full width for each id: trained, divided, and what they hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from serving.training.dataset import FilmsDataset, FilmsOptions, TrainingError, films_description, labelled_requests
from serving.training.network import float32_scores
from serving.training.trainer import divided, kept_by, train_described, training_counts
from shardrank_testing.movielens import small_interactions

DATASET = FilmsDataset.split(small_interactions(), seed=0)


def description(tables: dict[str, Any], **options: Any):
    given = {"kind": "mlp", "dtype": "fp32", "tables": tables, **options}
    return films_description(DATASET.interactions, FilmsOptions.model_validate(given))


def trained_with(tables: dict[str, Any], keep_share: float | None = None, **options: Any):
    return train_described(DATASET, description(tables, **options), keep_share=keep_share, epochs=1)


def scores_in_training(model) -> np.ndarray:
    return float32_scores(model, labelled_requests(DATASET, model.spec, DATASET.train).requests)


def test_pruning_unused_rows_changes_no_training_score() -> None:
    whole = trained_with({}, profile=True, crosses=True)
    model = description({}, profile=True, crosses=True)
    counts = training_counts(DATASET, model)
    kept = kept_by(1.0, model, counts)
    pruned = divided(whole, model.compiled(kept), counts)
    assert kept["zip_film"] == np.count_nonzero(counts["zip_film"]) < counts["zip_film"].size - 1
    assert pruned.tables["zip_film"].shape == (kept["zip_film"] + 1, 16)
    np.testing.assert_array_equal(scores_in_training(pruned), scores_in_training(whole))


def test_pruning_keeps_the_hottest_rows_and_the_others_mean() -> None:
    whole, model = trained_with({}), description({})
    counts = training_counts(DATASET, model)
    kept = kept_by(0.5, model, counts)
    pruned = divided(whole, model.compiled(kept), counts)
    order = np.argsort(-counts["films"], kind="stable")
    hottest, others = np.sort(order[: kept["films"]]), order[kept["films"] :]
    assert counts["films"][hottest].sum() >= 0.5 * counts["films"].sum()
    rows = whole.tables["films"]
    np.testing.assert_array_equal(pruned.tables["films"][:-1], rows[hottest])
    np.testing.assert_allclose(pruned.tables["films"][-1], rows[others].mean(axis=0), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"films": {"num_embeddings": 0}}, r"table 'films': num_embeddings.*greater than or equal to 1"),
        ({"films": {"nope": 1}}, r"table 'films': .*unknown key 'nope'; allowed are .*'blocks'"),
        ({"more": {"num_embeddings": 9, "feature_names": ["x"]}}, r"table 'more': feature_names: unknown \['x'\]"),
        ({"films": {"dtype": {"hot": "fp16", "cold": "int4", "hot_share": 2}}}, r"hot_share: .*less than 1"),
        ({"films": {"id_mapping": {"kind": "quotient_remainder", "buckets": 0}}}, r"buckets: .*greater than"),
    ],
)
def test_tables_that_are_none_are_refused_by_name(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        description(tables)
