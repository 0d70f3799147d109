"""NVIDIA Triton with dynamic batching and the model in its Python backend; asked over HTTP with a binary tensor.

nvidia-pytriton brings Triton itself. Its own way to bind functions runs them all in one Python process; the Python
backend runs each instance in a process of its own, which is what a user with two cores wants. Triton imports this file
as the model.
"""

import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
from torch_model import Scorer

CONFIG = """
name: "rank"
backend: "python"
max_batch_size: 8
input [{{ name: "body", data_type: TYPE_UINT8, dims: [-1], allow_ragged_batch: true }}]
output [{{ name: "scores", data_type: TYPE_FP32, dims: [-1] }}]
instance_group [{{ count: {workers}, kind: KIND_CPU }}]
dynamic_batching {{ max_queue_delay_microseconds: 1000 }}
"""


class TritonPythonModel:
    """One instance; Triton forms the batches."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model."""
        self._scorer = Scorer(os.environ["PEER_WEIGHTS"])

    def execute(self, requests: list[Any]) -> list[Any]:
        """Score the requests of a batch together."""
        import triton_python_backend_utils as triton

        bodies = [triton.get_input_tensor_by_name(request, "body").as_numpy().tobytes() for request in requests]
        scores = [np.frombuffer(answer, np.float32)[None] for answer in self._scorer.answers(bodies)]
        return [triton.InferenceResponse([triton.Tensor("scores", each)]) for each in scores]


def main() -> None:
    """Lay the model out, and become Triton."""
    import pytriton

    port, workers = os.environ["PEER_PORT"], os.environ["PEER_WORKERS"]
    triton = Path(pytriton.__file__).resolve().parent / "tritonserver"
    # In the folder of the weights, which is removed with them: this process becomes Triton and can't clean up.
    home = Path(os.environ["PEER_WEIGHTS"]).parent / f"triton-{port}"
    model, backend = home / "models" / "rank", home / "backends" / "python"
    (model / "1").mkdir(parents=True)
    shutil.copy(__file__, model / "1" / "model.py")
    shutil.copy(Path(__file__).with_name("torch_model.py"), model / "1")
    (model / "config.pbtxt").write_text(CONFIG.format(workers=workers))
    # The backend's program that runs Python has to be the one for this Python, and be stored with the backend.
    shutil.copytree(triton / "backends" / "python", backend)
    stubs = triton / "python_backend_stubs" / f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copy(stubs / "triton_python_backend_stub", backend)
    # This Python's library goes before the system's, whose standard library may be an older one.
    libraries = [sysconfig.get_config_var("LIBDIR"), str(triton.parent.parent / "nvidia_pytriton.libs")]
    os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, [*libraries, os.environ.get("LD_LIBRARY_PATH")]))
    # The backend's Python takes the environment of the first `python3` that it finds.
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    program = str(triton / "bin" / "tritonserver")
    options = {
        "model-repository": home / "models",
        "backend-directory": home / "backends",
        "http-address": "127.0.0.1",
        "http-port": port,
        "http-thread-count": max(2, int(workers)),
        "allow-grpc": "false",
        "allow-metrics": "false",
        # Loads what it is asked for by its API, after this one.
        "model-control-mode": "explicit",
        "load-model": "rank",
        "backend-config": f"python,shm-region-prefix-name=peer-{port}",
    }
    os.execv(program, [program, *(f"--{name}={value}" for name, value in options.items())])


if __name__ == "__main__":
    main()
