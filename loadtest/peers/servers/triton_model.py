"""The model in Triton's Python backend. Triton forms the batches; each worker is one of these, in its own process."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as triton
from torch_model import NO_CONTEXT, Scorer, Settings


class TritonPythonModel:
    """One instance."""

    def initialize(self, args: dict[str, str]) -> None:
        """Once."""
        del args
        self._scorer = Scorer(Settings.read().weights)

    def execute(self, requests: list[Any]) -> list[Any]:
        """All requests of a batch, scored together."""
        # Each request is a batch of one: its tensors have another first dimension.
        parts = [(self._side(request, "context_") or NO_CONTEXT, self._side(request, "")) for request in requests]
        return [
            triton.InferenceResponse([triton.Tensor("scores", np.ascontiguousarray(one[None]))])
            for one in self._scorer.scores(parts)
        ]

    def _side(self, request: Any, prefix: str) -> Any:
        tensors = [triton.get_input_tensor_by_name(request, prefix + name) for name in ("ids", "lengths", "dense")]
        return None if tensors[0] is None else tuple(one.as_numpy()[0] for one in tensors)
