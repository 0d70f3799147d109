"""`shardrank import` from what was found to a version that is served: described, imported, verified, ranked."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from loader.imports.kinds import Kind
from loader.snapshot.codecs import RowCodec
from loader.snapshot.reader import Snapshot
from router.plan_file import PlanFile
from serving.exporting import compiled, read_description
from serving.models.exported import export_program
from shardrank_testing.command_line import shardrank
from shardrank_testing.foreign_checkpoints import (
    Saved,
    of_quantised,
    quantised,
    saved_table,
    write_dynamicemb,
    write_hps,
)
from shardrank_testing.imported_model import (
    DENSE,
    MODEL,
    SIDES,
    TABLES,
    check_scores,
    golden,
    requests,
    scores_of,
    write,
)


def fill_in(file: Path, dtype: str = "fp32", **more: Any) -> None:
    """Do what a person does with what `--describe` wrote."""
    described = json.loads(file.read_text())
    assert "TODO" in json.dumps(described)
    described["tables"] = [table | {"dtype": dtype} for table in described["tables"] if table["name"] in TABLES]
    described["features"] = [one for one in described["features"] if one["name"] in SIDES]
    for feature in described["features"]:
        feature["side"] = SIDES[feature["name"]]
    described |= {"model": "shop", "dense_model": MODEL, **more}
    file.write_text(json.dumps(described))


def import_(folder: Path, words: list[object], *more: object, code: int | None = 0) -> str:
    described, store = folder / "shop.json", folder / "models"
    return shardrank("import", *words, "--model", described, "--store", store, *more, code=code).output


@pytest.mark.parametrize("kind", ["dynamicemb", "tzrec", "torchrec", "hps", "tfra", "numpy"])
def test_what_a_system_saved_is_described_imported_verified_and_ranked(tmp_path: Path, kind: Kind) -> None:
    words = write(tmp_path, kind)
    described = shardrank("import", *words[:2], "--describe", "--model", tmp_path / "shop.json").output
    for name, saved in TABLES.items():
        rows, dim = saved.rows.shape
        assert re.search(rf"^[^ ]*{name}[^ ]*: {rows} rows of {dim}, float.*, by key$", described, re.MULTILINE)
    fill_in(tmp_path / "shop.json")
    flags = golden(tmp_path)
    printed = import_(tmp_path, words, *flags, "--golden-tolerance", 0.01)
    path = tmp_path / "models" / "shop" / "1"
    assert f"wrote {path}" in printed
    assert ("an id without a row gets zeros" in printed) == (kind == "torchrec")
    verified = shardrank("verify", "--snapshot", path).output
    candidates = sum(len(scores_of(one)) for one in requests())
    assert f"golden requests: 3 with {candidates} candidates, every score within 0.01" in verified
    assert "may be served" in verified
    check_scores(path)
    assert Snapshot.open(path).manifest.golden is not None


def test_scores_may_be_the_apis_answers(tmp_path: Path) -> None:
    words = write(tmp_path, "hps")
    shardrank("import", *words[:2], "--describe", "--model", tmp_path / "shop.json")
    fill_in(tmp_path / "shop.json")
    flags = golden(tmp_path)
    answers = [json.dumps({"scores": scores_of(one)}) for one in requests()]
    (tmp_path / "answers.jsonl").write_text("\n".join(answers))
    import_(tmp_path, words, *flags[:2], "--scores", tmp_path / "answers.jsonl")
    import_(tmp_path, words, *flags)
    first, second = (Snapshot.open(tmp_path / "models" / "shop" / f"{n}").golden() for n in (1, 2))
    assert first is not None
    assert second is not None
    np.testing.assert_array_equal(first.scores, second.scores)
    np.testing.assert_allclose(first.scores, np.concatenate([scores_of(one) for one in requests()]), rtol=1e-6)
    lines = (tmp_path / "answers.jsonl").read_text().splitlines()
    for text, problem in (
        ("\n".join([*lines[:2], "{"]), "answers.jsonl, line 3: no JSON"),
        ("\n".join([*lines[:2], "[1]"]), "answers.jsonl, line 3: expected an object, found '[1]'"),
        ("\n".join([*lines[:2], "{}"]), "answers.jsonl: an answer has not the lists scores"),
        ("\n".join(lines[:2]), "golden requests: scores: expected float32"),
    ):
        (tmp_path / "answers.jsonl").write_text(text)
        printed = import_(tmp_path, words, *flags[:2], "--scores", tmp_path / "answers.jsonl", code=1)
        assert problem in printed
    assert "--golden-from and --scores go with each other" in import_(tmp_path, words, *flags[:2], code=1)
    np.save(tmp_path / "scores.npy", 1 - np.load(tmp_path / "scores.npy"))
    import_(tmp_path, words, *flags, "--golden-tolerance", 1e-3)
    assert "golden_mismatch" in shardrank("verify", "--snapshot", tmp_path / "models/shop/3", code=1).output


def test_tables_that_the_description_does_not_have_are_left_out_and_told(tmp_path: Path) -> None:
    for kind, told in (("dynamicemb", "model.more"), ("hps", "more")):
        folder = tmp_path / kind
        words = write(folder_of(folder), kind)
        extra = {"more": saved_table(4, 5, 3)}
        if kind == "hps":
            write_hps(folder / "saved", extra)
        else:
            write_dynamicemb(folder / "saved", extra)
        shardrank("import", *words[:2], "--describe", "--model", folder / "shop.json")
        fill_in(folder / "shop.json")
        assert f"{told}: left out, the description has no such table" in import_(folder, words)
        check_scores(folder / "models/shop/1")


def folder_of(path: Path) -> Path:
    path.mkdir()
    return path


def test_rows_of_another_dim_or_without_the_keys_that_are_described_are_refused(tmp_path: Path) -> None:
    words = write(tmp_path, "hps")
    shardrank("import", *words[:2], "--describe", "--model", tmp_path / "shop.json")
    fill_in(tmp_path / "shop.json")
    vectors = np.fromfile(tmp_path / "saved/films/emb_vector", np.float32)
    # Cut off by as much as there are keys, which the files alone do not show.
    vectors[:-60].tofile(tmp_path / "saved/films/emb_vector")
    assert "table 'films': 'films' is [60, 7], the spec says [60, 8]" in import_(tmp_path, words, code=1)
    vectors.tofile(tmp_path / "saved/films/emb_vector")
    described = json.loads((tmp_path / "shop.json").read_text())
    described["tables"][0] = {
        "name": "films", "num_embeddings": 60, "embedding_dim": 8, "feature_names": ["films"]
    }  # fmt: skip
    (tmp_path / "shop.json").write_text(json.dumps(described))
    assert "'films' has keys, the description has none; allowed is int64" in import_(tmp_path, words, code=1)


def test_a_description_is_printed_or_written_once(tmp_path: Path) -> None:
    words = write(tmp_path, "numpy")
    printed = json.loads(shardrank("import", *words[:2], "--describe").stdout)
    assert [(one["name"], one["embedding_dim"]) for one in printed["tables"]] == [
        ("dense.kernel", 6), ("dense_1.kernel", 1), ("films", 8), ("users", 4)
    ]  # fmt: skip
    file = tmp_path / "shop.json"
    shardrank("import", *words[:2], "--describe", "--model", file)
    assert json.loads(file.read_text()) == printed
    again = shardrank("import", *words[:2], "--describe", "--model", file, code=2).output
    assert "is there already; --describe writes a new one" in again
    refused = import_(tmp_path, words, code=1)
    assert "shop.json: features.0.side: Input should be 'context' or 'candidate'" in refused
    assert "--model and --store are needed, or --describe" in shardrank("import", *words[:2], code=2).output
    missing = shardrank("import", *words[:2], "--model", tmp_path / "no", "--store", tmp_path / "models", code=2).output
    assert "--describe writes one" in missing


DIES = """
import os, signal, sys
from loader.snapshot.store import ExportFolder
from serving.cli import main

write, left = ExportFolder.write, int(sys.argv[1])

def write_and_die(self, path, save):
    global left
    entry, left = write(self, path, save), left - 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    return entry

ExportFolder.write = write_and_die
main(sys.argv[2:])
"""


@pytest.mark.nightly
def test_an_import_that_was_killed_is_the_same_version_when_it_is_run_again(tmp_path: Path) -> None:
    words = write(tmp_path, "tfra")
    shardrank("import", *words[:2], "--describe", "--model", tmp_path / "shop.json")
    fill_in(tmp_path / "shop.json")
    flags = golden(tmp_path)
    import_(tmp_path, words, *flags)
    whole, other = Snapshot.open(tmp_path / "models/shop/1"), tmp_path / "other"
    command = ["import", *words, "--model", tmp_path / "shop.json", "--store", other, *flags]
    for finished in (1, 2):
        script = [sys.executable, "-c", DIES, str(finished), *map(str, command)]
        ended = subprocess.run(script, check=False, timeout=100, capture_output=True)
        assert ended.returncode == -9, ended.stderr
        assert not list(other.rglob("manifest.json"))
    shardrank(*command)
    again = Snapshot.open(other / "shop/1")
    # All but the time is the same, and with it the identity.
    assert again.manifest == whole.manifest.model_copy(update={"created_at": again.manifest.created_at})
    check_scores(again.path)


def stored_by_key(snapshot: Snapshot, table: str) -> dict[int, bytes]:
    """Return what the rows of a table are worth, by key."""
    spec = next(one for one in snapshot.spec.tables if one.name == table)
    keys, rows = snapshot.keys(table, 0), snapshot.rows_file(table, 0)
    return Saved(RowCodec(spec.dtype, spec.embedding_dim).decode(rows), np.asarray(keys)).by_key()


def test_int8_rows_keep_their_codes_and_those_stored_otherwise_tell_how_far_off_they_are(tmp_path: Path) -> None:
    words = write(tmp_path, "tzrec", is_quantised=True)
    worth = {name: Saved(of_quantised(quantised(saved.rows)), saved.keys) for name, saved in TABLES.items()}
    for version, dtype in enumerate(("int8", "int4", "fp32"), 1):
        (tmp_path / "shop.json").unlink(missing_ok=True)
        described = shardrank("import", *words[:2], "--describe", "--model", tmp_path / "shop.json").output
        assert "films: 60 rows of 8, uint8 with float16 scale and offset, by key" in described
        fill_in(tmp_path / "shop.json", dtype)
        printed, path = import_(tmp_path, words, *golden(tmp_path, worth)), tmp_path / f"models/shop/{version}"
        told = re.findall(rf"(\w+): rows of int8 became {dtype}, values differ by up to ([\d.e-]+)", printed)
        if dtype != "int4":
            assert told == ([] if dtype == "int8" else [("films", "0"), ("users", "0")])
            assert stored_by_key(Snapshot.open(path), "films") == worth["films"].by_key()
            check_scores(path, worth)
        else:
            assert [name for name, _ in told] == ["films", "users"]
            rows = worth["films"].by_key()
            now = stored_by_key(Snapshot.open(path), "films")
            off = [
                abs(np.frombuffer(now[key], np.float32) - np.frombuffer(rows[key], np.float32)).max() for key in rows
            ]
            assert float(told[0][1]) == pytest.approx(max(off), rel=1e-2)
            assert max(off) > 0.01


class Logits(nn.Module):
    """The MLP of these tests, as a program."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.last = nn.Linear(12, 6), nn.Linear(6, 1)
        names = ("hidden.weight", "hidden.bias", "last.weight", "last.bias")
        self.load_state_dict({name: torch.from_numpy(one) for name, one in zip(names, DENSE.values(), strict=True)})

    def forward(self, film: Tensor, user: Tensor) -> Tensor:
        result: Tensor = self.last(torch.relu(self.hidden(torch.cat([film, user], 1)))).squeeze(1)
        return result


def test_a_program_is_the_dense_model_of_what_was_imported(tmp_path: Path) -> None:
    words = write(tmp_path, "dynamicemb")[:2]
    shardrank("import", *words, "--describe", "--model", tmp_path / "shop.json")
    inputs = {
        "film": {"source": "pooled", "features": ["films"]},
        "user": {"source": "pooled", "features": ["users"]},
    }
    fill_in(
        tmp_path / "shop.json",
        dense_model={"kind": "exported", "inputs": inputs, "outputs": {"click": {"activation": "sigmoid"}}},
    )
    spec = compiled("", read_description(tmp_path / "shop.json"), None, {"films": 60, "users": 30})
    torch.export.save(export_program(spec, Logits()), tmp_path / "shop.pt2")
    flags = golden(tmp_path)
    answers = [json.dumps({"scores": scores_of(one), "outputs": {"click": scores_of(one)}}) for one in requests()]
    (tmp_path / "answers.jsonl").write_text("\n".join(answers))
    import_(tmp_path, words, "--program", tmp_path / "shop.pt2", *flags[:2], "--scores", tmp_path / "answers.jsonl")
    assert "may be served" in shardrank("verify", "--snapshot", tmp_path / "models/shop/1", "--trust-exported").output
    check_scores(tmp_path / "models/shop/1", trust_exported=True)
    assert "--program goes with a dense_model of kind exported" in import_(tmp_path, words, code=1)


def test_a_plan_of_torchrec_divides_what_was_imported(tmp_path: Path) -> None:
    words = write(tmp_path, "hps")
    shardrank("import", *words[:2], "--describe", "--model", tmp_path / "shop.json")
    fill_in(tmp_path / "shop.json")
    shards = [
        {"shard_offsets": [0, 4 * rank], "shard_sizes": [60, 4], "placement": f"rank:{rank}/cpu"} for rank in (0, 1)
    ]
    films = {"sharding_type": "column_wise", "compute_kernel": "fused", "ranks": [0, 1], "shards": shards}
    users = {"sharding_type": "data_parallel", "compute_kernel": "dense", "ranks": [0, 1], "shards": None}
    (tmp_path / "plan.json").write_text(json.dumps({"plan": {"model.ebc": {"films": films, "users": users}}}))
    import_(tmp_path, words, *golden(tmp_path), "--plan", tmp_path / "plan.json")
    snapshot = Snapshot.open(tmp_path / "models/shop/1")
    text = snapshot.plan_text()
    assert text is not None
    plan = PlanFile.parse("plan", text)
    assert (plan.num_shards, plan.cards_per_shard) == (2, 1)
    assert [(one.table, one.sharding_type, one.column_dims) for one in plan.tables] == [
        ("films", "column_wise", (4, 4)), ("users", "data_parallel", ()),
    ]  # fmt: skip
    assert snapshot.spec.tables[0].column_dims == (4, 4)
    assert "may be served" in shardrank("verify", "--snapshot", snapshot.path).output
    check_scores(snapshot.path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[1]", "names.json, line 1: expected an object"),
        ('{"mlp.layers.0.weight": 3}', "'mlp.layers.0.weight': expected a key, or"),
        ('{"mlp.layers.0.weight": {"key": "a", "by": 2}}', "'mlp.layers.0.weight': expected a key, or"),
        ('{"mlp.layers.0.weight": {"key": "a", "transpose": "yes"}}', "'mlp.layers.0.weight': expected a key, or"),
        ('{"mlp.layers.0.weight": "kernel"}', "has no tensor 'kernel'"),
        ('{"mlp.layers.0.weight": "dense.kernel"}', "missing tensors"),
    ],
)
def test_a_map_of_dense_names_that_does_not_fit_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    words = write(tmp_path, "numpy")
    shardrank("import", *words[:2], "--describe", "--model", tmp_path / "shop.json")
    fill_in(tmp_path / "shop.json")
    (tmp_path / "names.json").write_text(text)
    assert problem in import_(tmp_path, words, code=1)
    assert not list((tmp_path / "models").rglob("manifest.json"))
