"""Optimizers of rows against PyTorch's, and against their formulas in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shard_node.training.row_optimizers import RowOptimizer, summed

STEPS, ROWS, DIM = 30, 7, 5


def gradients() -> np.ndarray:
    return np.random.default_rng(5).normal(size=(STEPS, ROWS, DIM)).astype(np.float32)


def trained(optimizer: RowOptimizer) -> np.ndarray:
    rows = np.ones((ROWS, DIM), np.float32)
    state = np.zeros((ROWS, optimizer.state_width(DIM)), np.float32)
    for gradient in gradients():
        optimizer.update(rows, state, gradient)
    return rows


@pytest.mark.parametrize(
    ("kind", "theirs"),
    [("sgd", torch.optim.SGD), ("adam", lambda parameters, lr: torch.optim.Adam(parameters, lr=lr, eps=1e-8))],
)
def test_rows_become_what_pytorch_makes_of_them(kind, theirs):
    weight = torch.ones(ROWS, DIM, requires_grad=True)
    optimizer = theirs([weight], lr=0.05)
    for gradient in gradients():
        weight.grad = torch.from_numpy(gradient)
        optimizer.step()
    np.testing.assert_allclose(trained(RowOptimizer(kind=kind, lr=0.05)), weight.detach(), rtol=2e-5, atol=2e-5)


def test_adagrad_is_row_wise():
    rows, squares = np.ones((ROWS, DIM)), np.zeros(ROWS)
    for gradient in gradients().astype(np.float64):
        squares += (gradient**2).mean(axis=1)
        rows -= 0.05 * gradient / (np.sqrt(squares)[:, None] + 1e-8)
    np.testing.assert_allclose(trained(RowOptimizer(kind="adagrad", lr=0.05)), rows, rtol=2e-5, atol=2e-6)


@given(st.lists(st.integers(-3, 3), max_size=40))
def test_gradients_of_an_id_are_added_in_their_order(ids):
    values = np.random.default_rng(len(ids)).normal(size=(len(ids), 3)).astype(np.float32)
    expected: dict[int, np.ndarray] = {}
    for one, value in zip(ids, values, strict=True):
        expected[one] = expected[one] + value if one in expected else value
    found, sums = summed(np.array(ids, np.int64), values)
    assert found.tolist() == sorted(expected)
    np.testing.assert_array_equal(sums, np.array([expected[one] for one in sorted(expected)]).reshape(-1, 3))
