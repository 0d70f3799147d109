"""The fleet on simulated time keeps its rules on a fresh range of seeds each day, and finds faults put back into it."""

from __future__ import annotations

import datetime
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation import training

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = sorted((Path(__file__).parent / "mutants").glob("*.patch"))


def simulate(arguments: str, folder: Path = ROOT, limit_s: float = 600.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.simulation", *arguments.split()]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=limit_s, check=False)


@pytest.mark.timeout(600)
def test_every_rule_holds_on_the_seeds_of_the_day():
    """As many as 8 s take, and at least 8; what is printed replays the one that fails."""
    first = datetime.date.today().toordinal() * 100_000
    ran = simulate(f"--seeds 100000 --first {first} --minutes 0.13 --at-least 8", limit_s=580)
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    assert int(ran.stdout.split()[0]) >= 8


@pytest.mark.nightly
def test_a_seed_is_replayed_exactly():
    ran = simulate("--seeds 1 --first 11 --twice --shrink-s 0")
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]


@pytest.mark.parametrize("seeds", [20, pytest.param(2000, marks=[pytest.mark.nightly, pytest.mark.timeout(1800)])])
def test_pushes_of_training_are_applied_once_whoever_dies(tmp_path, seeds):
    training.run_many(datetime.date.today().toordinal() * 100_000, seeds, tmp_path)


def checkout_with(patch: Path, folder: Path) -> Path:
    """Copy what the simulation imports, and put a fault into it."""
    for name in ("loader", "shard_node", "router", "serving", "tests/simulation"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", str(patch)], cwd=folder, check=True)
    return folder


@pytest.mark.parametrize("patch", MUTANTS, ids=lambda patch: patch.stem)
def test_faults_to_be_found_are_of_this_code(patch):
    checked = subprocess.run(["git", "apply", "--check", patch], cwd=ROOT, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, f"{patch.name} is of another release: {checked.stderr}"


@pytest.mark.nightly
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("patch", MUTANTS, ids=lambda patch: patch.stem)
def test_each_fault_is_found(tmp_path, patch):
    ran = simulate("--seeds 2000 --shrink-s 0", checkout_with(patch, tmp_path), 3900)
    assert ran.returncode == 1, ran.stderr[-2000:]
    assert re.match(r"\d+ seeds, one of which breaks a rule", ran.stdout)
