"""What levers cost and save: bytes as they are stored, collisions as they are counted, and the learner of clicks."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from loader.snapshot.codecs import RowCodec
from loader.snapshot.reader import Snapshot
from loadtest.errors import LeversError
from loadtest.levers import page
from loadtest.levers.__main__ import main
from loadtest.levers.hash_sizes import (
    CRITEO_COLUMNS,
    DIM,
    Clicks,
    FactorizationMachine,
    count_collisions,
    log_loss,
    measure_loss,
    read_criteo,
)
from loadtest.levers.movielens import LeverResult, LeversReport, as_stored, describe, levers_of, stored_bytes
from serving.training.dataset import FilmsDataset
from serving.training.trainer import export_trained, train_described
from shardrank_testing.movielens import small_interactions

DATA = small_interactions()


def test_every_lever_describes_a_model_of_fewer_bytes_than_the_first() -> None:
    every = levers_of(DATA)
    assert len({(one.group, one.name) for one in every}) == len(every)
    for lever in every:
        assert {one.name for one in describe(DATA, lever).compiled().features} >= {"user_id", "history", "film_id"}
    assert describe(DATA, every[0]).compiled().table_of("zip_film").dtype == "fp32"


def test_bytes_and_rows_are_those_of_the_snapshot(tmp_path: Path) -> None:
    lever, dataset = levers_of(DATA)[-1], FilmsDataset.split(DATA, seed=0)
    model = train_described(dataset, describe(DATA, lever), pruning=lever.pruning, epochs=1)
    snapshot = Snapshot.open(export_trained(model, dataset, tmp_path))
    decoded, size = as_stored(model).tables, 0
    for table in snapshot.spec.tables:
        rows = snapshot.read_rows(table.name, 0, table.num_embeddings)
        size += rows.nbytes
        found = RowCodec(table.dtype, table.embedding_dim).decode(rows)
        np.testing.assert_array_equal(found, decoded[table.name])
    classes = [snapshot.row_classes(one.name) for one in snapshot.spec.divided if one.num_classes > 1]
    size += sum(bitmap.size_bytes for one in classes for bitmap in one.bitmaps)
    size += sum(one.nbytes for name, one in snapshot.dense_tensors().items() if name.startswith("projections."))
    assert stored_bytes(model) == size


def test_collisions_are_counted_by_lookups_and_expected_as_balls_in_bins() -> None:
    ids, counts = np.arange(10_000), np.full(10_000, 3)
    found = count_collisions({"C1": (ids, counts)}, 10.0)
    assert (found.rows, found.ids, found.lookups) == (100_000, 10_000, 30_000)
    assert found.expected == pytest.approx(1 - math.exp(-0.1), abs=1e-4)
    assert found.changed == pytest.approx(found.expected, abs=0.01)
    together = count_collisions({"C1": (np.arange(4), np.array([5, 1, 3, 1]))}, 0.01)
    assert (together.rows, together.changed, together.outnumbered) == (1, 1.0, 0.5)


def test_a_file_that_is_no_criteo_sample_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    with pytest.raises(LeversError, match=r"train\.csv: .*No such file"):
        read_criteo(path)
    path.write_text("Id,C1\n1,ff\n")
    with pytest.raises(LeversError, match=r"train\.csv: .*'C2'"):
        read_criteo(path)
    path.write_text(",".join(CRITEO_COLUMNS) + "\n" + ",".join(["zz"] * 26) + "\n")
    with pytest.raises(LeversError, match=r"train\.csv: C1: .*'zz'"):
        read_criteo(path)
    path.write_text(",".join(CRITEO_COLUMNS) + "\n" + ",".join(["ff"] * 25) + ",\n")
    assert read_criteo(path)["C1"][0].tolist() == [255]
    assert read_criteo(path)["C26"][0].size == 0


def test_a_step_of_the_factorization_machine_follows_the_gradient_of_log_loss() -> None:
    model = FactorizationMachine(12, seed=0)
    model.rows.normal_(generator=torch.Generator().manual_seed(1))
    rows, labels = torch.arange(12).view(3, 4), torch.tensor([1.0, 0.0, 1.0])
    before = model.rows.clone().requires_grad_()
    logits = []
    for own in before[rows]:
        pairs = [own[f, 1:] @ own[g, 1:] for f in range(4) for g in range(f)]
        logits.append(model.bias + own[:, 0].sum() + sum(pairs))
    loss = torch.nn.functional.binary_cross_entropy_with_logits(torch.stack(logits), labels, reduction="sum")
    torch.testing.assert_close(model.logits(rows)[0], torch.stack(logits).detach())
    (gradient,) = torch.autograd.grad(loss, before)
    model.learn(rows, labels)
    expected = before.detach() - 0.08 * gradient / (0.1 + gradient.square()).sqrt()
    torch.testing.assert_close(model.rows, expected, rtol=1e-4, atol=1e-5)


def test_more_rows_learn_more_of_the_teacher() -> None:
    clicks = Clicks.of_teacher(60_000, 0, (2000, 1000, 500, 300))
    end = clicks.num_learnt
    assert end == 54_000
    starts = np.array([0, 2000, 3000, 3500])[:, None]
    own = measure_loss(clicks, clicks.ids + starts, 3800, seed=0)
    few = measure_loss(clicks, (clicks.ids % 5) + 5 * np.arange(4)[:, None], 20, seed=0)
    seen = clicks.labels[end:]
    constant = log_loss(seen, np.full(seen.size, float(clicks.labels[:end].mean())))
    assert log_loss(seen, clicks.chances[end:]) < own < few < constant


def test_tables_and_pictures_say_what_was_measured(tmp_path: Path) -> None:
    base = LeverResult(group="baseline", name="fp32", bytes=1000, auc=(0.7, 0.72), difference=0, interval=0)
    less = base.model_copy(update={"group": "in order", "name": "int4", "bytes": 100, "difference": -0.001})
    lost = less.model_copy(update={"name": "all", "difference": -0.002, "interval": 0.0005})
    report = LeversReport(
        source="films", seeds=(0, 1), epochs=1, embedding_dim=DIM, rows={"users": 3}, levers=(base, less, lost)
    )
    lines = page.levers_table(report).splitlines()
    assert lines[3] == "| in order: int4 | 100 B | 10.00 | 0.7100 | -0.0010 ± 0.0000 | yes |"
    assert lines[4].endswith("| -0.0020 ± 0.0005 | no |")
    picture = ET.fromstring(page.standalone(page.levers_picture(report)))
    assert len(picture.findall(".//{*}circle")) == 3
    out = tmp_path / "sizes.json"
    given = ["hash-sizes", "--clicks", "2000", "--out", str(out)]
    told = CliRunner().invoke(main, given)
    assert told.exit_code == 0, told.output
    document = json.loads(out.read_text())["clicks"]
    assert [one["share"] for one in document["sizes"]] == [None, 1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01]
    assert f"The teacher itself: {document['teacher']:.4f}" in told.output
    ET.fromstring(out.with_suffix(".svg").read_text())
