"""The lookup benchmark measures what it says, on answers that it has compared first."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from loader.snapshot.reader import Snapshot
from loadtest.bench_lookup import LookupShape, bare_arena, main, make_batch, write_snapshot

CALLS = {"bare_op", "local", "local_2_cards", "unix_socket", "embedding_bag_fp32"}


def test_a_small_run_reports_every_cell_and_its_ratios(tmp_path):
    file = tmp_path / "lookup.json"
    arguments = ["--json", str(file), "--table-gb", "0.002", "--dim", "8", "--features", "3", "--seconds", "0"]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    report = json.loads(file.read_text())
    cells = [(one["embedding_dim"], one["hotness"], one["batch"]) for one in report["results"]]
    assert cells == [(8, hotness, batch) for hotness in (1, 20) for batch in (1, 64, 512)]
    for one in report["results"]:
        assert one["rows_per_batch"] == 3 * one["batch"] * one["hotness"]
        assert set(one["us_per_batch"]) == CALLS
        for name in CALLS:
            assert one["ns_per_row"][name] == pytest.approx(one["us_per_batch"][name] * 1e3 / one["rows_per_batch"])
            assert one["ratio_to_bare_op"][name] == pytest.approx(
                one["us_per_batch"][name] / one["us_per_batch"]["bare_op"]
            )


def test_the_bare_arena_holds_the_snapshots_rows_table_after_table(tmp_path):
    shape = LookupShape(embedding_dim=4, num_tables=3, table_bytes=12 * 3 * 1000)
    snapshot = Snapshot.open(write_snapshot(tmp_path, shape))
    batch = make_batch(shape, np.random.default_rng(0), batch=5, hotness=1)
    pooled = bare_arena(snapshot, shape).pool(batch.slots, batch.bags.offsets, None)
    for number, (slot, value) in enumerate(zip(batch.slots, batch.bags.values, strict=True)):
        table = snapshot.spec.tables[number // 5].name
        row = snapshot.read_rows(table, int(value), 1)[0]
        scale, bias = row[4:].view(np.float32)
        np.testing.assert_allclose(pooled[number], row[:4] * scale + bias, rtol=1e-5, atol=1e-6)
        assert slot == number // 5 * 1000 + value
