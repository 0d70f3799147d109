"""NVIDIA Triton with dynamic batching and the model in its Python backend; asked over HTTP with binary tensors.

nvidia-pytriton brings Triton itself. Its own way to bind functions runs them all in one Python process; the Python
backend runs each instance in a process of its own, which is what a user with two cores wants.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

import pytriton
from torch_model import Settings

HOST = "127.0.0.1"
MAX_WAIT_US = 1000
CONFIG = """
name: "rank"
backend: "python"
max_batch_size: {max_batch}
input [
  {{ name: "ids", data_type: TYPE_INT64, dims: [-1], allow_ragged_batch: true }},
  {{ name: "lengths", data_type: TYPE_INT32, dims: [-1, -1], allow_ragged_batch: true }},
  {{ name: "dense", data_type: TYPE_FP32, dims: [-1, -1], allow_ragged_batch: true }},
  {{ name: "context_ids", data_type: TYPE_INT64, dims: [-1], allow_ragged_batch: true, optional: true }},
  {{ name: "context_lengths", data_type: TYPE_INT32, dims: [-1, -1], allow_ragged_batch: true, optional: true }},
  {{ name: "context_dense", data_type: TYPE_FP32, dims: [-1, -1], allow_ragged_batch: true, optional: true }}
]
output [{{ name: "scores", data_type: TYPE_FP32, dims: [-1] }}]
instance_group [{{ count: {workers}, kind: KIND_CPU }}]
dynamic_batching {{ max_queue_delay_microseconds: {max_wait_us} }}
"""


def main() -> None:
    """Becomes Triton."""
    settings = Settings.read()
    servers = Path(__file__).resolve().parent
    triton = Path(pytriton.__file__).resolve().parent / "tritonserver"
    # Beside the weights, so that it goes when they go: this process becomes Triton and can't clean up.
    home = Path(settings.weights).parent / f"triton-{settings.port}"
    model = home / "models" / "rank"
    (model / "1").mkdir(parents=True)
    shutil.copy(servers / "triton_model.py", model / "1" / "model.py")
    shutil.copy(servers / "torch_model.py", model / "1")
    config = CONFIG.format(max_batch=settings.batch, workers=settings.workers, max_wait_us=MAX_WAIT_US)
    (model / "config.pbtxt").write_text(config, encoding="utf-8")
    # The backend's program that runs Python has to be the one for this Python, and lie beside the backend.
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    backend = home / "backends" / "python"
    shutil.copytree(triton / "backends" / "python", backend)
    shutil.copy(triton / "python_backend_stubs" / version / "triton_python_backend_stub", backend)
    # This Python's own library goes before the system's, whose standard library may be an older one.
    own = [sysconfig.get_config_var("LIBDIR"), str(triton.parent.parent / "nvidia_pytriton.libs")]
    libraries = [*own, os.environ.get("LD_LIBRARY_PATH")]
    environment = os.environ | {
        "LD_LIBRARY_PATH": ":".join(filter(None, libraries)),
        # The backend's Python takes the environment of the first `python3` that it finds.
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
    }
    command = [
        str(triton / "bin" / "tritonserver"),
        f"--model-repository={home / 'models'}",
        f"--backend-directory={home / 'backends'}",
        f"--http-address={HOST}",
        f"--http-port={settings.port}",
        f"--http-thread-count={max(2, settings.workers)}",
        "--allow-grpc=false",
        "--allow-metrics=false",
        f"--backend-config=python,shm-region-prefix-name=peer-{settings.port}",
    ]
    os.execve(command[0], command, environment)


if __name__ == "__main__":
    main()
