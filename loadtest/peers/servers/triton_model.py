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
        # Each request is a batch of one: its tensors have another first dimension.
        parts = [
            tuple(triton.get_input_tensor_by_name(request, name).as_numpy()[0] for name in ("ids", "lengths", "dense"))
            for request in requests
        ]
        return [
            triton.InferenceResponse([triton.Tensor("scores", np.ascontiguousarray(one[None]))])
            for one in self._scorer.scores(parts)
        ]
