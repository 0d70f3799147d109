"""The scripts for a machine with a GPU, as far as they go without one, and the page made from what they leave."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from loadtest import bench_gpu
from loadtest.gpu import report
from loadtest.gpu.parts import BenchPart, BenchReport
from shardrank_testing.card_sets import card_factory

ROOT = Path(__file__).resolve().parents[3]
MOST_S = {"a": 540, "b": 520, "c": 380}
BENCH = ["-m", "loadtest.bench_gpu"]


def planned(script: str) -> dict[str, tuple[int, list[str]]]:
    """The steps of a script: seconds at most and command, by name."""
    command = [ROOT / "scripts/gpu" / script, "--plan", "--python", sys.executable, "results"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()
    return {name: (int(limit), shlex.split(said)) for name, limit, said in (line.split("\t") for line in lines)}


@pytest.mark.parametrize("script", MOST_S)
def test_every_step_of_a_script_can_run(script):
    steps = planned(script)
    assert next(iter(steps)) == "device"
    for limit, command in steps.values():
        assert limit <= MOST_S[script]
        assert [word for word in command if word.startswith("tests/") and not (ROOT / word).exists()] == []
        if BENCH[1] in command:
            options = command[command.index(BENCH[1]) + 1 :]
            parameters = bench_gpu.main.make_context("bench", options).params
            assert parameters["seconds"] < limit
    junit = [word for _, command in steps.values() for word in command if word.endswith(".xml")]
    assert len(set(junit)) == len(junit)


def test_counted_launches_are_those_that_the_page_divides_by():
    _, command = planned("c")["counters-dim-64"]
    options = dict(pairwise(command))
    assert int(options["--hotness"]) * int(options["--batch"]) == report.ROWS_COUNTED
    counted = set(options["--metrics"].split(","))
    assert {report.DRAM, report.PEAK, report.SECTORS, report.HITS, report.WARPS, report.ISSUE} <= counted
    assert {report.STALLED, report.DURATION, report.REGISTERS} <= counted
    assert options["--clock-control"] == "none"


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it would run for nine minutes")
def test_a_script_goes_to_its_first_call_to_cuda_and_says_why_it_ends_there(tmp_path):
    command = [ROOT / "scripts/gpu/a", "--python", sys.executable, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "== a: failed: device" in done.stdout
    assert "CardsUnavailableError" in (tmp_path / "a-device.log").read_text()
    (step,) = report.Found.read([tmp_path]).steps
    assert step[:3] == ["a", "device", "1"]


def test_steps_go_on_after_one_that_failed_or_took_too_long(tmp_path):
    script = tmp_path / "d"
    script.write_text(
        f"source {ROOT}/scripts/gpu/steps\n"
        'step hangs 1 sleep 60\nstep fails 9 sh -c "exit 3"\nstep works 9 echo well\nfinish\n'
    )
    # In place of a Python that finds a device.
    command = ["bash", script, "--python", "true", tmp_path / "results"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 1
    assert done.stdout.endswith("== d: failed: hangs fails\n")
    steps = report.Found.read([tmp_path / "results"]).steps
    assert [step[1:3] for step in steps] == [["device", "0"], ["hangs", "124"], ["fails", "3"], ["works", "0"]]
    assert (tmp_path / "results" / "d-works.log").read_text() == "well\n"


HANGS = """
import ctypes, sys, types
import pytest

pytestmark = pytest.mark.gpu


def block(libc):
    mutex = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)  # No signal ends this.


def test_before(): pass
def test_is_blocked(): block(ctypes.CDLL(None))
def test_is_blocked_with_pythons_lock(): block(ctypes.PyDLL(None))
def test_loses_the_device():
    def synchronize():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    device = types.SimpleNamespace(is_initialized=lambda: True, synchronize=synchronize)
    sys.modules["torch"] = types.SimpleNamespace(cuda=device)
    raise AssertionError("wrong sums")
def test_after():
    assert "torch" not in sys.modules
"""


def test_a_test_that_hangs_or_loses_the_device_costs_only_itself(tmp_path):
    (tmp_path / "test_tiny.py").write_text(HANGS)
    shutil.copy(ROOT / "tests/conftest.py", tmp_path)
    _, command = planned("a")["kernels"]
    shorter = {"60": "2", "faulthandler_timeout=80": "faulthandler_timeout=3", "results/a-kernels.xml": "kernels.xml"}
    command = [shorter.get(word, word) for word in command if not word.startswith("tests/")]
    options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1, done.stdout
    cases = ElementTree.parse(tmp_path / "kernels.xml").iter("testcase")
    assert {case.get("name"): len(case) > 0 for case in cases} == {
        "test_before": False,
        "test_is_blocked": True,
        "test_is_blocked_with_pythons_lock": True,
        "test_loses_the_device": True,
        "test_after": False,
    }
    assert "the device is lost: CUDA error: an illegal memory access" in done.stdout + done.stderr
    (run,) = report.Found.read([tmp_path / "kernels.xml"]).tests
    assert run.passed == 2


SMALL = replace(
    bench_gpu.QUICK,
    table_bytes=20_000,
    pinned_bytes=8_000,
    copy_bytes=4096,
    dims=(16,),
    hotness=(2,),
    batches=(32,),
    cell_s=0.0,
    cache_bytes=1000,
    compared_bytes=100_000,
    max_sets=4,
)


def test_the_bench_is_measured_on_emulated_cards_by_the_scripts_own_command(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_gpu, "QUICK", SMALL)
    monkeypatch.setattr(bench_gpu, "open_on", lambda device, *rest: card_factory("emulated")(*rest))
    _, command = planned("a")["bench"]
    path = tmp_path / "a-bench.json"
    options = [str(path) if word.endswith(".json") else word for word in command[command.index(BENCH[1]) + 1 :]]
    result = CliRunner().invoke(bench_gpu.main, [*options, "--one-process"])
    assert result.exit_code == 0, result.output
    text = report.page(report.Found.read([tmp_path]))
    assert "| measured by predicted time" not in text
    for begin in ("# The CUDA engine on emulated", "## Aims", "| what | aim | measured |", "kernel, int8", "- cards: "):
        assert begin in text
    lines = text.splitlines()
    (share,) = (line for line in lines if line.startswith("| 100% |"))
    assert share.count("|") == 6
    written = tmp_path / "page.md"
    shown = CliRunner().invoke(report.main, [str(path), "--write", str(written)])
    assert shown.output.startswith("For README:\n\n| on a GPU | aim | measured |\n| --- | ---: | ---: |\n")
    assert written.read_text() == text


NCU = """==PROF== Connected to process 9 (/usr/bin/python3.12)
==PROF== Profiling "pool_int8" - 0: 0%....50%....100% - 4 passes
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"Section Name","Metric Name","Metric Unit","Metric Value"
"""


def ncu_line(launch: int, name: str, unit: str, value: str) -> str:
    begin = [str(launch), "9", "python3.12", "127.0.0.1", "pool_int8", "1", "13", "(256, 1, 1)", "(8192, 1, 1)", "0"]
    cells = [*begin, "9.0", "Command line profiler metrics", name, unit, value]
    return ",".join(f'"{cell}"' for cell in cells) + "\n"


def test_counters_are_read_from_among_what_else_ncu_says(tmp_path):
    path = tmp_path / "c-counters-dim-128.csv"
    bytes_read, peak, hits = (
        (report.DRAM, "byte", "251,658,240"),
        (report.PEAK, "%", "63.50"),
        (report.HITS, "%", "n/a"),
    )
    values = (bytes_read, peak, hits, (report.ISSUE, "inst/cycle", "0.25"), (report.DURATION, "us", "98.5"))
    lines = [ncu_line(launch, *value) for launch in (0, 1) for value in values]
    path.write_text(NCU + "".join(lines) + "==PROF== Disconnected from process 9\n")
    first, second = report.Found.read([path]).launches
    assert first == second
    assert (first.dim, first.kernel) == (128, "pool_int8")
    assert first.counters == {
        report.DRAM: 251_658_240.0, report.PEAK: 63.5, report.ISSUE: 0.25, report.DURATION: 98_500.0
    }  # fmt: skip
    assert first.figures() == ["98.5", "192", "-", "64", "-", "-", "0.25", "-", "-"]


@pytest.mark.parametrize(
    ("counters", "limit"),
    [
        ({report.PEAK: 91.0, report.ISSUE: 0.9}, "memory is at its peak"),
        ({report.PEAK: 60.0, report.ISSUE: 0.9}, "issue is full"),
        ({report.PEAK: 60.0, report.ISSUE: 0.3, report.WARPS: 30.0}, "few warps"),
        ({report.PEAK: 60.0, report.ISSUE: 0.3, report.WARPS: 70.0}, "neither memory nor issue"),
    ],
)
def test_counters_name_what_the_limit_was(counters, limit):
    assert report.Launch(128, "pool_int8", counters).limit().startswith(limit)


def bench_with_misses(path: Path) -> BenchReport:
    """One aim missed by the kernel at dim 128, one by requests, one met."""
    row = {"dim": 128, "ids": "uniform", "hotness": 20, "batch": 65536, "share_on_card": 1.0, "correct": True}
    row |= {"out_dtype": "bf16", "columns": "product", "us_per_launch": 100.0, "ceiling_us": 70.0}
    row |= {"share_of_copy": 0.6, "ceiling_share_of_copy": 0.7}
    kernel = [
        {**row, "logical_cards": 1, "places": False, "share_of_ceiling": 0.7, "ratio_to_one_card": 0.9},
        {**row, "logical_cards": 8, "places": True, "share_of_ceiling": 0.6, "ratio_to_one_card": 1.02},
    ]
    request = {"model": "dlrm", "candidates": 500, "graphs": True, "logical_cards": 1, "dtype": "bfloat16"}
    stages = {"queue": 0.01, "lookup": 0.4, "rank": 2.1}
    ranking = [{**request, "p50_ms": 2.6, "p99_ms": 3.0, "mean_stage_ms": stages, "correct": True}]
    parts = {"kernel": BenchPart("kernel", rows=kernel), "ranking": BenchPart("ranking", rows=ranking)}
    head = {"benchmark": "bench_gpu", "format": bench_gpu.FORMAT, "date": "2026-12-01T10:00:00Z"}
    return BenchReport(path, {**head, "machine": {"device": {"name": "NVIDIA H100"}}}, parts)


def test_a_missed_aim_is_said_with_what_explains_it():
    bench = bench_with_misses(Path("b-bench.json"))
    launch = report.Launch(128, "pool_int8", {report.PEAK: 63.0, report.ISSUE: 0.2, report.WARPS: 37.0})
    gather = report.Launch(128, "gather_8", {report.PEAK: 68.0})
    rows, missed = report.aim_lines(bench, [gather, launch])
    measured = [measured for _, _, measured in rows]
    assert any(one.startswith("**1.02** (dim 128") for one in measured)
    assert "not measured" in measured
    requests = next(line for line in missed if "queue 0.010 ms, lookup 0.400 ms, rank 2.100 ms" in line)
    assert "missed in 1 of 1" in requests
    (kernel,) = (line for line in missed if "worst: few warps" in line)
    assert (
        "(DRAM % of peak 63, warps % of all 37, instructions a cycle 0.20; of random reads alone: DRAM % of peak 68)"
        in (kernel)
    )
    assert set(missed) == {kernel, requests}


def test_files_of_all_kinds_make_one_page(tmp_path):
    bench_with_misses(tmp_path / "b-bench.json").save()
    (tmp_path / "c-memcheck.log").write_text("========= COMPUTE-SANITIZER\n...\n========= ERROR SUMMARY: 0 errors\n")
    (tmp_path / "c-steps.tsv").write_text("step\tstatus\tseconds\tlimit\nmemcheck\t124\t200\t200\n")
    (tmp_path / "a-bench.log").write_text("of no use here")
    (tmp_path / "a-kernels.xml").write_text(
        '<testsuites><testsuite time="61.2" tests="3"><testcase classname="tests.a" name="well"/>'
        '<testcase classname="tests.a" name="ill"><failure message="assert 1 == 2&#10;more">long</failure></testcase>'
        '<testcase classname="tests.a" name="far"><skipped message="2 cards, 1 device"/></testcase>'
        "</testsuite></testsuites>"
    )
    text = report.page(report.Found.read([tmp_path]))
    for line in (
        "# The CUDA engine on NVIDIA H100, 2026-12-01",
        "| c-memcheck.log | 0 | 0 |",
        "| c | memcheck | 124 | 200 | 200 |",
        "| a-kernels.xml | 1 | 1 | 1 | 61 |",
        "- failed: `tests.a::ill`: assert 1 == 2",
        "- skipped, 1: 2 cards, 1 device",
    ):
        assert line in text.splitlines()


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.json", "{}"), ("a.xml", "<testsuites>"), ("a.xml", "<a/>"), ("a.csv", '"ID"\n"1"\n'), ("a.txt", "")],
)
def test_a_file_that_is_not_a_result_is_refused_by_its_name(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    shown = CliRunner().invoke(report.main, [str(path)])
    assert shown.exit_code == 2
    assert name in json.dumps(shown.output.replace("\n", ""))
