"""The scripts for a machine with a GPU, as far as they go without one."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from loadtest.gpu import __main__ as bench
from loadtest.gpu.rows import BenchSize
from shardrank_testing.card_engines import card_factory

ROOT = Path(__file__).resolve().parents[3]
MAX_S = {"a": 540, "b": 520, "c": 380}


def planned(script: str) -> dict[str, tuple[int, list[str]]]:
    """The steps of a script: seconds at most and command, by name."""
    command = [ROOT / "scripts/gpu" / script, "--plan", "--python", sys.executable, "results"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()
    steps = (line.split("\t") for line in lines)
    return {name: (int(limit), shlex.split(step_command)) for name, limit, step_command in steps}


@pytest.mark.parametrize("script", MAX_S)
def test_every_step_of_a_script_can_run(script):
    steps = planned(script)
    assert next(iter(steps)) == "device"
    for limit, command in steps.values():
        assert limit <= MAX_S[script]
        assert [word for word in command if word.startswith("tests/") and not (ROOT / word).exists()] == []
        if "loadtest.gpu" in command:
            bench.main.make_context("bench", command[command.index("loadtest.gpu") + 1 :])
    written = [word for _, command in steps.values() for word in command if word.endswith((".xml", ".json"))]
    assert len(set(written)) == len(written)


def test_the_first_step_describes_the_device(monkeypatch, capsys):
    monkeypatch.setattr(bench, "open_device", lambda device, num_cards: card_factory("emulated")(num_cards))
    _, command = planned("b")["device"]
    exec(command[-1], {})
    assert "kernels_sha256" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("python", "steps"),
    [
        ("true", [["device", "0"], ["hangs", "124"], ["fails", "3"], ["works", "0"]]),
        ("false", [["device", "1"]]),
    ],
)
def test_steps_go_on_after_a_failed_one_but_the_first(tmp_path, python, steps):
    """In place of a Python that finds a device, or none."""
    script = tmp_path / "d"
    script.write_text(
        f"source {ROOT}/scripts/gpu/steps\n"
        'step hangs 1 sleep 60\nstep fails 9 sh -c "exit 3"\nstep works 9 echo well\nfinish\n'
    )
    command = ["bash", script, "--python", python, tmp_path / "results"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 1
    assert [line.split("\t")[:2] for line in (tmp_path / "results/d-steps.tsv").read_text().splitlines()[1:]] == steps
    failed = " ".join(name for name, status in steps if status != "0")
    assert done.stdout.endswith(f"== d: failed: {failed}\n")


SMALL = BenchSize(table_bytes=20_000, dims=(16,), hotness=(2,), batches=(32,), logical_cards=(1,), cell_s=0.0)


def test_the_scripts_command_goes_on_after_a_failed_part(tmp_path, monkeypatch):
    """On emulated cards. The file is complete after each row; a failed part keeps its rows, and the exit code is 1."""
    path = tmp_path / "gpu.json"

    def fail(results, *_):
        results.add("ranking", {"requests": 3})
        assert json.loads(path.read_text())["status"] == {"ranking": "running"}
        raise RuntimeError("the card is gone")

    monkeypatch.setattr(bench, "QUICK", SMALL)
    monkeypatch.setattr(bench, "open_device", lambda device, num_cards: card_factory("emulated")(num_cards))
    monkeypatch.setattr(bench, "measure_ranking", fail)
    _, command = planned("a")["pooling"]
    options = command[command.index("loadtest.gpu") + 1 : -1]
    result = CliRunner().invoke(bench.main, ["--part", "ranking", *options, str(path)])
    assert result.exit_code == 1
    assert "RuntimeError: the card is gone" in result.output
    written = json.loads(path.read_text())
    assert written["status"] == {"ranking": "failed: RuntimeError: the card is gone", "pooling": "done"}
    assert written["machine"]["packages"]["torch"] == torch.__version__
    assert len(written["machine"]["kernels_sha256"]) == 64
    assert written["rows"][0] == {"part": "ranking", "requests": 3}
    assert [row["places"] for row in written["rows"] if "us" in row] == [False, True]
