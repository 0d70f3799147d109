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

MAX_WAIT_US = 1000
INPUTS = {"ids": ("INT64", "-1"), "lengths": ("INT32", "-1, -1"), "dense": ("FP32", "-1, -1")}
INPUT = '{{ name: "{}", data_type: TYPE_{}, dims: [{}], allow_ragged_batch: true, optional: {} }}'
CONFIG = """
name: "rank"
backend: "python"
max_batch_size: {batch}
input [ {inputs} ]
output [{{ name: "scores", data_type: TYPE_FP32, dims: [-1] }}]
instance_group [{{ count: {workers}, kind: KIND_CPU }}]
dynamic_batching {{ max_queue_delay_microseconds: {max_wait_us} }}
"""


def main() -> None:
    """Become Triton."""
    port, workers, batch = (os.environ[f"PEER_{name}"] for name in ("PORT", "WORKERS", "BATCH"))
    triton = Path(pytriton.__file__).resolve().parent / "tritonserver"
    # In the folder of the weights, which is removed with them: this process becomes Triton and can't clean up.
    home = Path(os.environ["PEER_WEIGHTS"]).parent / f"triton-{port}"
    model = home / "models" / "rank"
    (model / "1").mkdir(parents=True)
    for source, target in (("triton_model.py", "model.py"), ("torch_model.py", "torch_model.py")):
        shutil.copy(Path(__file__).with_name(source), model / "1" / target)
    inputs = [
        INPUT.format(prefix + name, *of_type, optional)
        for prefix, optional in (("", "false"), ("context_", "true"))
        for name, of_type in INPUTS.items()
    ]
    config = CONFIG.format(batch=batch, inputs=", ".join(inputs), workers=workers, max_wait_us=MAX_WAIT_US)
    (model / "config.pbtxt").write_text(config, encoding="utf-8")
    # The backend's program that runs Python has to be the one for this Python, and be stored with the backend.
    backend = home / "backends" / "python"
    shutil.copytree(triton / "backends" / "python", backend)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copy(triton / "python_backend_stubs" / version / "triton_python_backend_stub", backend)
    # This Python's library goes before the system's, whose standard library may be an older one.
    libraries = [sysconfig.get_config_var("LIBDIR"), str(triton.parent.parent / "nvidia_pytriton.libs")]
    os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, [*libraries, os.environ.get("LD_LIBRARY_PATH")]))
    # The backend's Python takes the environment of the first `python3` that it finds.
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    folders = [f"--model-repository={home / 'models'}", f"--backend-directory={home / 'backends'}"]
    http = ["--http-address=127.0.0.1", f"--http-port={port}", f"--http-thread-count={max(2, int(workers))}"]
    others = ["--allow-grpc=false", "--allow-metrics=false", f"--backend-config=python,shm-region-prefix-name=peer-{port}"]
    program = str(triton / "bin" / "tritonserver")
    os.execv(program, [program, *folders, *http, *others])


if __name__ == "__main__":
    main()
