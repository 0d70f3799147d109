"""The oracle of dense steps: it tells what a score was made of, and that a fleet's answers are never mixed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from loadtest.bench_dense import FRACTIONS, OFFSET, SCALE, deltas_of, is_mixed, main, tensors_of


def scores_of(deltas: list[int], step: int) -> np.ndarray:
    """What the served model gives for rows of these deltas, in float32."""
    weights = {name: tensor.numpy() for name, tensor in tensors_of(step).items()}
    x = np.stack([np.array(deltas, np.float32), np.zeros(len(deltas), np.float32)], 1)
    logits = x @ weights["mlp.layers.0.weight"].T + weights["mlp.layers.0.bias"]
    return (1 / (1 + np.exp(-logits[:, 0]))).astype(np.float32)


@pytest.mark.parametrize("step", range(2 * FRACTIONS))
def test_a_score_tells_the_delta_of_its_row(step: int) -> None:
    deltas = [0, 1, 700, 3000]
    np.testing.assert_allclose(deltas_of(scores_of(deltas, step), step), deltas, atol=0.01)
    assert not is_mixed(scores_of(deltas[2:], step), step, 700)


def test_a_row_older_than_the_step_allows_is_mixed() -> None:
    assert is_mixed(scores_of([699, 800], 3), 3, 700)


def test_an_answer_of_another_step_than_it_names_or_of_two_is_mixed() -> None:
    assert is_mixed(scores_of([700], 4), 3, 700)
    assert is_mixed(np.concatenate([scores_of([700], 3), scores_of([700], 2)]), 3, 700)


def test_rows_that_were_half_written_are_mixed() -> None:
    logit = OFFSET + SCALE * (700.5 + 3 / FRACTIONS)
    assert is_mixed(np.array([1 / (1 + np.exp(-logit))], np.float32), 3, 700)


def test_a_real_fleet_answers_with_new_steps_and_none_of_it_is_mixed(tmp_path: Path) -> None:
    options = ["--seconds", "3", "--window-s", "1.5", "--every-s", "0.5", "--shards", "1", "--replicas", "2"]
    done = CliRunner().invoke(main, [*options, "--json", str(tmp_path / "found.json")])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["mixed"], found["failed"], found["details"]) == (0, 0, [])
    assert found["dense steps that answered"] >= 1
    assert min(found["answers"].values()) > 10
