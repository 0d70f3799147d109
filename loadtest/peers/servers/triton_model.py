"""The model in Triton's Python backend. Triton forms the batches; each worker is one of these, in its own process."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as triton
from torch_model import Scorer, Settings


class TritonPythonModel:
    """One instance."""

    def initialize(self, args: dict[str, str]) -> None:
        """Once."""
        del args
        self._scorer = Scorer(Settings.read().weights)

    def execute(self, requests: list[Any]) -> list[Any]:
        """All requests of a batch, scored together."""
        ids = [triton.get_input_tensor_by_name(request, "ids").as_numpy() for request in requests]
        dense = [triton.get_input_tensor_by_name(request, "dense").as_numpy() for request in requests]
        groups: dict[tuple[int, ...], list[int]] = {}
        for number, one in enumerate(ids):
            groups.setdefault(one.shape[1:], []).append(number)
        answers: list[Any] = [None] * len(requests)
        for group in groups.values():
            scores = self._scorer.scores(
                np.concatenate([ids[number] for number in group]), np.concatenate([dense[number] for number in group])
            )
            ends = np.cumsum([len(ids[number]) for number in group])
            for number, one in zip(group, np.split(scores, ends[:-1]), strict=True):
                answers[number] = triton.InferenceResponse([triton.Tensor("scores", one[:, None])])
        return answers
