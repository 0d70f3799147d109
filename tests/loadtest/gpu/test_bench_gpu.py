"""Every part of the GPU bench, on next to nothing: on emulated cards, and on a GPU where there is one."""

from __future__ import annotations

import io
import os
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from loadtest.bench_gpu import main, run_here
from loadtest.gpu.parts import FULL, BenchPart, BenchReport
from loadtest.gpu.pooling import BAG, GATHER, OURS, TBE
from loadtest.gpu.rows import TOLERANCE
from loadtest.gpu.tables import show
from loadtest.gpu.timing import GROUP, LEAST_LAUNCHES, time_graphs, time_in_turns
from loadtest.gpu.variants import shapes_for
from shard_node.cuda.kernel_params import EACH_SWITCH
from shardrank_testing.card_sets import card_factory

TINY = replace(
    FULL,
    table_bytes=20_000,
    pinned_bytes=8_000,
    copy_bytes=4096,
    dims=(16, 8),
    hotness=(1, 5),
    batches=(32, 100),
    logical_cards=(1, 2, 8),
    shares_on_card=(0.0, 0.5),
    cell_s=0.0,
    cache_bytes=1000,
    compared_bytes=100_000,
    max_sets=4,
    request_table_rows=40,
    request_hotness=3,
    layer_divisor=32,
    candidates=(2, 5),
    max_batch_candidates=40,
    requests=4,
    throughput_s=0.0,
)
CARDS = ["emulated", pytest.param("logical", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def opened_of(kind):
    return lambda num_cards, switches=None: card_factory(kind, switches)(num_cards)


@pytest.fixture(params=CARDS)
def opened(request):
    return opened_of(request.param)


def run(names, opened, tmp_path, size=TINY) -> BenchReport:
    report = BenchReport(tmp_path / "result.json", {"benchmark": "bench_gpu", "format": 1})
    run_here(report, names, 100.0, opened, size)
    read = BenchReport.read(tmp_path / "result.json")
    assert [(part.status, part.error) for part in read.parts.values()] == [("done", None)] * len(names)
    return read


@pytest.fixture(scope="module", params=CARDS)
def measured(request, tmp_path_factory) -> BenchReport:
    """Three parts of one run, which several tests look at."""
    return run(["copy", "kernel", "compare"], opened_of(request.param), tmp_path_factory.mktemp("measured"))


def rows_of(part: BenchPart, **wanted):
    return [row for row in part.rows if all(row[name] == value for name, value in wanted.items())]


def test_copies_and_the_kernel_are_measured_at_every_size(measured):
    report = measured
    assert [row["copy"] for row in report.parts["copy"].rows] == [
        "device to pinned",
        "pinned to device",
        "within the device",
        *(f"gather, stride {one}" for one in ("16, 16 bytes", *(f"{n}, 16 bytes with tail" for n in (32, 16, 32)))),
    ]
    for row in report.parts["copy"].rows[3:]:
        assert row["gb_per_s"] == pytest.approx(row["rows_per_s"] * row["bytes_moved"] / (20 * 100) / 1e9)
    kernel = report.parts["kernel"]
    for dim, hotness, batch in product(TINY.dims, TINY.hotness, TINY.batches):
        shape = {"dim": dim, "hotness": hotness, "batch": batch}
        kinds = (("uniform", "bf16"), ("uniform", "fp32"), ("zipf", "bf16"))
        for (ids, out), cards in product(kinds, (0, *TINY.logical_cards)):
            placed = {"logical_cards": max(1, cards), "places": cards > 0, "share_on_card": 1.0, "columns": "product"}
            (row,) = rows_of(kernel, **shape, ids=ids, out_dtype=out, **placed)
            assert ("ceiling_us" in row) == (ids == "uniform")
            if ids == "uniform":
                assert row["share_of_ceiling"] == pytest.approx(row["ceiling_us"] / row["us_per_launch"])
            assert row["ns_per_row"] == pytest.approx(row["us_per_launch"] * 1e3 / (hotness * batch))
            assert row["us_low"] <= row["us_per_launch"] <= row["us_high"]
            assert 0 < row["gb_per_s_rows"] < row["gb_per_s_all"]
            assert (row["predicted_ns_per_row"] is None) == (ids == "zipf")
        for share in TINY.shares_on_card:
            (row,) = rows_of(kernel, **shape, share_on_card=share)
            assert row["gb_per_s_bus"] == pytest.approx(row["gb_per_s_rows"] * (1 - share))
    assert len(kernel.rows) == 2 * (4 * (3 * 4 + 2) + 4)
    assert all(row["correct"] and row["largest_error"] < TOLERANCE[row["out_dtype"]] for row in kernel.rows)
    (dense, *_) = rows_of(kernel, columns="dense")
    assert (dense["hotness"], dense["batch"]) == (20, max(TINY.batches))
    assert set(kernel.facts) >= {"clock", "table_dim_16", "table_dim_8"}
    assert report.head["machine"]["versions"]["torch"] == torch.__version__


def test_others_pool_the_same_sums_from_the_same_rows(measured):
    part = measured.parts["compare"]
    shapes = {(row["dim"], row["dtype"], row["hotness"], row["batch"]) for row in part.rows}
    assert shapes == set(product(TINY.dims, ("fp16", "fp32"), TINY.hotness, (100,)))
    for row in part.rows:
        assert set(row["times"]) >= {OURS, BAG, GATHER}
        assert row["times"][OURS] == 1.0
        assert row["times"][BAG] == pytest.approx(row["ns_per_row"][BAG] / row["ns_per_row"][OURS])
        assert all(difference < 4e-3 for difference in row["difference"].values())


def test_without_fbgemm_the_notes_say_what_is_missing(tmp_path):
    part = run(["compare"], card_factory("emulated"), tmp_path, replace(TINY, fbgemm=tmp_path, dims=(8,))).parts[
        "compare"
    ]
    assert f"{TBE} was not measured: {tmp_path / 'asmjit.so'} is not there" in part.notes


@pytest.mark.skipif(
    "SHARDRANK_FBGEMM" not in os.environ, reason="needs FBGEMM's libraries: SHARDRANK_FBGEMM names them"
)
def test_fbgemm_pools_the_same_sums(opened, tmp_path):
    size = replace(TINY, fbgemm=Path(os.environ["SHARDRANK_FBGEMM"]), dims=(64, 16))
    part = run(["compare"], opened, tmp_path, size).parts["compare"]
    assert part.rows
    assert all(TBE in row["times"] and row["difference"][TBE] < 4e-3 for row in part.rows)


def test_every_switch_is_measured_where_it_should_help(opened, tmp_path):
    size = replace(TINY, dims=(16,), batches=(32, 64))
    part = run(["variants"], opened, tmp_path, size).parts["variants"]
    expected = [
        (str(switches), hotness, batch, max(1, cards))
        for switches in EACH_SWITCH
        for hotness, batch, cards in shapes_for(switches, size)
    ]
    rows = [(row["switch"], row["hotness"], row["batch"], row["logical_cards"]) for row in part.rows]
    assert sorted(rows) == sorted(expected)
    assert (str(EACH_SWITCH[0]), 1, 64, 1) in rows
    for row in part.rows:
        assert row["times"] == pytest.approx(row["us_per_launch"] / row["default_us"])
        assert ("ceiling_us" in row) == row["switch"].startswith("l2_fetch_bytes")


@pytest.mark.parametrize("switch", ["bags_per_lane_group", "nothing=1", "bags_per_lane_group=3"])
def test_a_switch_that_is_none_is_refused(switch):
    result = CliRunner().invoke(main, ["--switch", switch])
    assert result.exit_code == 2
    assert "--switch" in result.output


def test_requests_are_ranked_end_to_end_as_the_cpu_engine_ranks_them(opened, tmp_path):
    part = run(["ranking"], opened, tmp_path).parts["ranking"]
    assert all(row["correct"] and row["spread_of_scores"] > 1e-3 for row in part.rows)
    timed = [row for row in part.rows if "p50_ms" in row]
    configurations = [(row["model"], row["logical_cards"], row["graphs"], row["candidates"]) for row in timed]
    assert sorted(configurations) == sorted(product(("dlrm", "dcn_v2"), (1, 4), (False, True), TINY.candidates))
    for row in timed:
        assert 0 < row["p10_ms"] <= row["p50_ms"] <= row["p99_ms"]
        assert (row["share_by_graph"] > 0) == row["graphs"]
        assert row["candidates_per_s"] == pytest.approx(row["requests_per_s"] * row["candidates"])


def test_the_tables_show_every_part(measured):
    output = io.StringIO()
    show(measured, Console(file=output, width=140))
    text = output.getvalue()
    for title in ("copies", "kernel, int8", "kernel, ns/row by share", "beside others", "parts", "aims"):
        assert title in text


def test_a_file_that_can_not_be_written_is_told_before_any_work(tmp_path):
    result = CliRunner().invoke(main, ["--json", str(tmp_path / "nowhere" / "gpu.json")])
    assert result.exit_code == 2
    assert "can't be written: No such file or directory" in re.sub(r"[\s│]+", " ", result.output)


def test_a_part_without_time_measures_nothing_and_says_so(tmp_path):
    report = BenchReport(tmp_path / "result.json", {"benchmark": "bench_gpu", "format": 1})
    run_here(report, ["kernel", "compare"], 0.0, card_factory("emulated"), replace(TINY, cell_s=1e6))
    assert {part.status for part in report.parts.values()} == {"stopped"}
    assert not report.parts["kernel"].rows


def test_graphs_of_short_work_have_32_launches():
    card = card_factory("emulated")(1).cards[0]
    (timing,) = time_graphs(card, card.stream(), {"a": lambda: None}, launches=3, seconds=0.0).values()
    assert timing.launches == 33 >= LEAST_LAUNCHES


def test_pieces_of_work_take_turns():
    card = card_factory("emulated")(1).cards[0]
    done: list[str] = []
    work = {name: (lambda name=name: done.append(name)) for name in "ab"}
    timings = time_in_turns(card, card.stream(), work, launches=1, seconds=0.0)
    assert done == ["a", "b", "a", *["a", "b"] * GROUP]
    assert {name: timing.rounds for name, timing in timings.items()} == {"a": GROUP, "b": GROUP}
