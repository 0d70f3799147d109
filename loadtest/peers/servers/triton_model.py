"""The model in Triton's Python backend. Triton forms the batches; each worker is one of these, in its own process."""

import os
from typing import Any

import numpy as np
import triton_python_backend_utils as triton
from torch_model import Scorer


class TritonPythonModel:
    """One instance."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model."""
        self._scorer = Scorer(os.environ["PEER_WEIGHTS"])

    def execute(self, requests: list[Any]) -> list[Any]:
        """Score the requests of a batch together."""
        bodies = [triton.get_input_tensor_by_name(request, "body").as_numpy().tobytes() for request in requests]
        scores = [np.frombuffer(answer, np.float32)[None] for answer in self._scorer.answers(bodies)]
        return [triton.InferenceResponse([triton.Tensor("scores", each)]) for each in scores]
