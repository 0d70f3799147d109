"""The GPU bench loses nothing: parts that fail, hang, crash or run out of time leave what they had measured."""

from __future__ import annotations

import io
import json
import sys
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from loadtest.bench_gpu import SHARES, _command, _size, _size_options, allowance, main, run_apart
from loadtest.gpu.parts import BenchPart, BenchReport, BenchReportError, Work, run_part
from loadtest.gpu.pooling import BAG, TBE
from loadtest.gpu.tables import judge, show

HEAD = {"benchmark": "bench_gpu", "format": 1}


def report_at(path) -> BenchReport:
    report = BenchReport(path, dict(HEAD))
    report.save()
    return report


def test_a_failing_part_is_kept_with_its_rows_and_its_error(tmp_path):
    report = report_at(tmp_path / "result.json")

    def fail(work: Work) -> None:
        work.add({"figure": 1})
        raise RuntimeError("the card is gone")

    run_part(report, "copy", 5.0, fail)
    read = BenchReport.read(tmp_path / "result.json")
    assert read.parts["copy"].status == "failed"
    assert read.parts["copy"].error == "RuntimeError: the card is gone"
    assert read.parts["copy"].rows == [{"figure": 1}]
    assert any("in fail" in line for line in read.parts["copy"].facts["traceback"])
    assert read.failed(["copy"]) == ["copy"]


def test_a_wrong_answer_fails_the_part(tmp_path):
    report = report_at(tmp_path / "result.json")
    part = run_part(report, "kernel", 5.0, lambda work: [work.add({"correct": right}) for right in (True, False)])
    assert part.status == "failed"
    assert part.error == "1 of 2 rows gave wrong answers"


def test_a_part_stops_when_its_time_is_spent(tmp_path):
    seconds = iter(range(100))

    def measured(work: Work) -> None:
        while not work.out_of_time(2.0):
            work.add({})

    part = run_part(report_at(tmp_path / "result.json"), "kernel", 10.0, measured, clock=lambda: next(seconds))
    assert part.status == "stopped"
    assert 0 < len(part.rows) < 10


def test_a_part_that_left_nothing_counts_as_failed():
    assert BenchReport(None).failed(["copy"]) == ["copy"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"benchmark": "bench_gpu", "format": 9, "parts": {}}', '{"parts": 3}']
)
def test_another_file_is_refused(tmp_path, text):
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(BenchReportError, match=r"result\.json"):
        BenchReport.read(path)


def test_the_time_is_divided_among_the_parts_that_are_left():
    names = list(SHARES)
    left = 400.0
    for position, name in enumerate(names):
        first = allowance(names[position:], left)
        assert first == pytest.approx(left * SHARES[name] / sum(SHARES[one] for one in names[position:]))
        left -= first
    assert left == pytest.approx(0.0)


BEGIN = "from pathlib import Path; from loadtest.gpu.parts import BenchPart, BenchReport; import os, sys, time\n"
ENDINGS = {
    "done": "report.parts[name].status = 'done'; report.save()",
    "hangs": "time.sleep(600)",
    "crashes": "os._exit(77)",
}


def child(ending: str):
    """A part's process: leaves one row, then ends in one way or another."""
    text = BEGIN + textwrap.dedent(
        f"""
        path, name = Path(sys.argv[1]), sys.argv[2]
        report = BenchReport.read(path)
        report.parts[name] = BenchPart(name, status="running", rows=[dict(figure=1)])
        report.save()
        {ENDINGS[ending]}
        """
    )
    return lambda name, path, seconds: [sys.executable, "-c", text, str(path), name]


@pytest.mark.parametrize(
    ("ending", "status", "error"),
    [
        ("done", "done", None),
        ("hangs", "failed", "it did not end within"),
        ("crashes", "failed", "its process ended with 77"),
    ],
)
def test_a_parts_process_may_end_in_any_way(tmp_path, monkeypatch, ending, status, error):
    monkeypatch.setattr("loadtest.bench_gpu.START_S", 4.0)
    monkeypatch.setattr("loadtest.bench_gpu.GRACE_S", 0.0)
    path = tmp_path / "result.json"
    report = run_apart(report_at(path), path, ["copy"], 5.0, child(ending))
    part = BenchReport.read(path).parts["copy"]
    assert (part.status, part.rows) == (status, [{"figure": 1}])
    assert part.error is None if error is None else error in part.error
    assert report.failed(["copy"]) == ([] if status == "done" else ["copy"])


def test_other_parts_go_on_after_one_that_failed(tmp_path, monkeypatch):
    monkeypatch.setattr("loadtest.bench_gpu.START_S", 10.0)
    commands = {"copy": child("crashes"), "kernel": child("done")}
    path = tmp_path / "result.json"
    report = run_apart(report_at(path), path, list(commands), 30.0, lambda name, *rest: commands[name](name, *rest))
    assert {name: part.status for name, part in report.parts.items()} == {"copy": "failed", "kernel": "done"}


def test_the_command_line_writes_what_failed_and_ends_with_1(tmp_path):
    file = tmp_path / "result.json"
    result = CliRunner().invoke(main, ["--json", str(file), "--part", "copy", "--device", "cpu", "--seconds", "20"])
    assert result.exit_code == 1
    report = json.loads(file.read_text())
    assert "needs a CUDA device" in report["parts"]["copy"]["error"]
    assert report["benchmark"] == "bench_gpu"
    assert "not measured" in result.output


def test_a_parts_process_is_told_every_size():
    sizes = {"table_gb": 0.5, "fbgemm": Path("libraries"), "dims": (64, 32), "hotness": (7,), "batches": (100, 200)}
    options = ["--device=cuda:1", "--switch=absolute_bases=1", *_size_options(True, **sizes)]
    command = _command(options, "kernel", Path("result.json"), 12.0)
    parameters = main.make_context("bench", command[command.index("loadtest.bench_gpu") + 1 :]).params
    told = {name: parameters[name] for name in sizes}
    assert told == sizes
    assert parameters["turned"] == ("absolute_bases=1",)
    assert (parameters["names"], parameters["device"], parameters["seconds"]) == (("kernel",), "cuda:1", 12.0)
    assert parameters["quick"]
    assert parameters["one_process"]
    assert parameters["add"]
    size = _size(True, **sizes)
    assert (size.table_bytes, size.dims, size.hotness, size.batches) == (500_000_000, (64, 32), (7,), (100, 200))


def kernel_row(**fields):
    row = {"dim": 128, "ids": "uniform", "hotness": 20, "batch": 65536, "share_on_card": 1.0, "logical_cards": 1}
    row |= {"out_dtype": "bf16", "columns": "product", "places": False, "us_per_launch": 80.0, "ceiling_us": 76.0}
    row |= {"share_of_ceiling": 0.95, "ceiling_share_of_copy": 0.9, "share_of_copy": 0.88, "ratio_to_one_card": 1.0}
    return {**row, "correct": True, **fields}


def test_aims_are_judged_by_their_worst_figure():
    rows = [
        kernel_row(),
        kernel_row(dim=64, share_of_ceiling=0.76, us_per_launch=100.0, share_of_copy=0.6, ceiling_share_of_copy=0.8),
        kernel_row(hotness=1, share_of_ceiling=0.1),
        kernel_row(batch=256, share_of_ceiling=0.1),
        kernel_row(columns="dense", share_of_ceiling=0.1),
        kernel_row(ids="zipf", share_of_copy=1.4),
        kernel_row(places=True, share_of_ceiling=0.1),
        kernel_row(places=True, logical_cards=8, ratio_to_one_card=1.04),
        kernel_row(places=True, logical_cards=8, ratio_to_one_card=1.9, correct=False),
    ]
    same = {"dtype": "fp16", "hotness": 20, "batch": 65536, "correct": True}
    compared = [{**same, "dim": 64, "times": {BAG: 1.2, TBE: 1.1}}, {**same, "dim": 128, "times": {BAG: 1.9}}]
    parts = {"kernel": BenchPart("kernel", rows=rows), "compare": BenchPart("compare", rows=compared)}
    ceiling, copy, cards, bag_64, bag_128, tbe, request = judge(BenchReport(None, {}, parts))
    assert (ceiling["worst"], ceiling["best"], ceiling["met_in"], ceiling["configurations"]) == (0.76, 0.95, 1, 2)
    assert ceiling["worst_at"].endswith("batch 65536, out_dtype bf16: ceiling 76.0 us, kernel 100.0 us")
    assert (copy["worst"], copy["met"], copy["configurations"]) == (0.88, True, 1)
    assert (cards["worst"], cards["met"]) == (1.04, True)
    assert [one["met"] for one in (bag_64, bag_128, tbe, request)] == [False, True, True, None]


def test_an_empty_result_says_that_nothing_was_measured():
    output = io.StringIO()
    show(BenchReport(None, {}, {"copy": BenchPart("copy", error="no [device]")}), Console(file=output, width=140))
    assert "not measured" in output.getvalue()
    assert "copy: no [device]" in output.getvalue()
