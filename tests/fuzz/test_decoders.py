"""Decoders read valid messages, and refuse changed ones by typed errors."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from shardrank_testing.fuzzing import TARGETS, mutated

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", TARGETS)
def test_changed_messages_are_read_or_refused(name):
    target, drawn = TARGETS[name], random.Random(name)
    seeds = target.seeds()
    for content in (b"", *seeds, *(mutated(seeds, drawn) for _ in range(1000))):
        target.check(content)


@pytest.mark.nightly
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", TARGETS)
def test_a_fuzzer_finds_nothing_in_a_minute(name, tmp_path):
    pytest.importorskip("atheris")
    command = [sys.executable, "-m", "tests.fuzz", name, "--seconds=60"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ['PYTHONPATH']}", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
