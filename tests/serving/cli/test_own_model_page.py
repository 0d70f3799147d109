"""docs/serving-your-own-model.md: its steps, from a module to a rollout under load, run as they are printed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from shardrank_testing.command_line import blocks

PAGE = (Path(__file__).resolve().parents[3] / "docs/serving-your-own-model.md").read_text(encoding="utf-8")
STEPS, _, REFERENCE = PAGE.partition("## What a description says")
SPEC, REQUEST = blocks(STEPS, "json")
TRAIN, ASK = blocks(STEPS, "python")
_, SERVE, ROLL_OUT = blocks(STEPS)
URL = "http://127.0.0.1:8080/v1/models/shop"
MAX_LINES = 100


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {"shop.json": SPEC, "request.json": REQUEST, "train.py": TRAIN, "ask.py": ASK}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def bash(script: str, folder: Path) -> str:
    """Run a script in a folder and return what it printed; what it has started ends with it."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    printed, command = folder / "printed", ("bash", "-euo", "pipefail", "-c", script)
    with printed.open("w") as file:
        running = subprocess.Popen(command, cwd=folder, env=environment, stdout=file, start_new_session=True)
    try:
        code = running.wait(timeout=200)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
    assert code == 0, printed.read_text()
    return printed.read_text()


@pytest.mark.timeout(240)
@pytest.mark.nightly
def test_a_model_of_ones_own_is_rolled_out_under_load_in_a_hundred_lines(folder: Path) -> None:
    written = [line for text in (SPEC, REQUEST, TRAIN, ASK, SERVE, ROLL_OUT) for line in text.splitlines() if line]
    assert len(written) <= MAX_LINES
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    # Where other tests have the CPU, the generator may be late, and its exit code says so.
    loaded = ROLL_OUT.replace("wait %2", "wait %2 || true").replace(
        "--rate 100 --duration 20", "--rate 40 --duration 15"
    )
    assert loaded.count("--rate 40") == 1
    script = "\n".join(
        [SERVE, "python ask.py", loaded, f"curl -s {URL}:rank -d @request.json -w '\\n'", "kill %1; wait %1"]
    )
    script = script.replace("shardrank up", f"shardrank up --http-port {port} --grpc-port 0")
    (folder / "ask.py").write_text(ASK.replace("8080", str(port)))
    printed = bash(script.replace("8080", str(port)), folder)
    first, last = (json.loads(line) for line in printed.splitlines() if line.startswith('{"model":"shop","version":'))
    assert (first["version"], last["version"]) == (1, 2)
    load = json.loads((folder / "load.json").read_text())
    # Those that wait for more than a second, where other tests have the CPU, have failed.
    assert load["answered"] >= 0.99 * load["due"] > 0
    for version, answer in ((1, first), (2, last)):
        golden = load_file(folder / f"models/shop/{version}/golden.safetensors")["scores"]
        assert answer["scores"] == pytest.approx(golden, abs=0.02)


@pytest.mark.nightly
def test_what_training_saved_is_exported_and_scores_the_same(folder: Path) -> None:
    (saving,) = blocks(REFERENCE, "py")
    export = next(block for block in blocks(REFERENCE) if block.startswith("shardrank export --checkpoint"))
    (folder / "train.py").write_text(f"{TRAIN}\n{saving}")
    bash(f"python train.py models 0\n{export}", folder)
    checked = bash("shardrank verify --store models --model shop --version 2 --trust-exported", folder)
    assert "golden requests: 1 with 2 candidates, every score within 0.05" in checked
    first, second = (load_file(folder / f"models/shop/{version}/golden.safetensors") for version in (1, 2))
    assert {name: array.tolist() for name, array in first.items()} == {
        name: array.tolist() for name, array in second.items()
    }
