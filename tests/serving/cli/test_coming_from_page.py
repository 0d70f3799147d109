"""docs/coming-from.md: what each section tells to type makes the version that scores what training scored."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from loader.deltas.blocking_publisher import DeltaPublisher
from loader.imports.kinds import Kind
from shardrank_testing.command_line import blocks, commands, shardrank
from shardrank_testing.imported_model import KERAS_NAMES, TABLES, check_scores, golden, requests, scores_of, write

PAGE = (Path(__file__).resolve().parents[3] / "docs/coming-from.md").read_text(encoding="utf-8")
SECTIONS: dict[str, str] = dict(section.split("\n", 1) for section in PAGE.split("\n## ")[1:])  # type: ignore[misc]
DESCRIPTION, REQUEST = blocks(SECTIONS["The way"], "json")
OF_KIND: dict[Kind, tuple[str, str]] = {
    "dynamicemb": ("DynamicEmb", "dump"),
    "tzrec": ("TorchEasyRec", "export"),
    "torchrec": ("TorchRec", "model.pt"),
    "hps": ("HugeCTR and HPS", "sparse"),
    "tfra": ("TensorFlow Recommenders Addons", "saved"),
    "numpy": ("NumPy: Keras, Merlin, JAX", "weights"),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    golden(tmp_path)
    return tmp_path


def run(section: str) -> str:
    """Run a section's commands as they are printed, with the page's description where one has to be filled in."""
    printed = ""
    for words in commands(SECTIONS[section]):
        printed += shardrank(*words[1:]).output
        if "--describe" in words:
            described, filled_in = (json.loads(text) for text in (Path("shop.json").read_text(), DESCRIPTION))
            found = {table["name"]: table for table in described["tables"]}
            assert [found[table["name"]] for table in filled_in["tables"]] == filled_in["tables"]
            Path("shop.json").write_text(DESCRIPTION)
    return printed


def check(folder: Path, printed: str, **options: Any) -> None:
    candidates = sum(len(scores_of(one)) for one in requests())
    assert f"golden requests: 3 with {candidates} candidates, every score within 0.05" in printed
    assert "may be served" in printed
    check_scores(folder / "models/shop/1", atol=0.02, **options)


@pytest.mark.parametrize("kind", OF_KIND)
def test_the_commands_of_a_kind_make_a_version_of_what_was_saved(folder: Path, kind: Kind) -> None:
    section, name = OF_KIND[kind]
    assert f"(#{section.lower().replace(' ', '-').replace(':', '').replace(',', '')})" in PAGE
    write(folder, kind, name)
    assert json.loads((folder / "requests.jsonl").read_text().splitlines()[1]).keys() == json.loads(REQUEST).keys()
    if kind == "numpy":
        (names,) = blocks(SECTIONS[section], "json")
        told = {ours: one if isinstance(one, str) else one["key"] for ours, one in json.loads(names).items()}
        assert told == KERAS_NAMES
        (folder / "names.json").write_text(names)
    check(folder, run(section))


def test_a_program_of_the_page_is_the_dense_model(folder: Path) -> None:
    section = SECTIONS["The dense model"]
    write(folder, "dynamicemb", "dump")
    (dense_model,), (program,) = blocks(section, "json"), blocks(section, "python")
    (folder / "shop.json").write_text(json.dumps(json.loads(DESCRIPTION) | {"dense_model": json.loads(dense_model)}))
    (folder / "program.py").write_text(program)
    runpy.run_path("program.py")
    answers = [{"scores": scores_of(one), "outputs": {"click": scores_of(one)}} for one in requests()]
    (folder / "answers.jsonl").write_text("\n".join(map(json.dumps, answers)))
    check(folder, run("The dense model"), trust_exported=True)


def test_the_plan_of_the_page_is_taken(folder: Path) -> None:
    write(folder, "dynamicemb", "dump")
    (folder / "shop.json").write_text(DESCRIPTION)
    tables = {
        name: {
            "sharding_type": "table_wise",
            "compute_kernel": "fused",
            "ranks": [rank],
            "shards": [
                {
                    "shard_offsets": [0, 0],
                    "shard_sizes": list(TABLES[name].rows.shape),
                    "placement": f"rank:{rank}/cuda:0",
                }
            ],
        }
        for rank, name in enumerate(TABLES)
    }
    (folder / "plan.json").write_text(json.dumps({"plan": {"model.ebc": tables}}))
    check(folder, run("TorchRec's plan"))
    assert (folder / "models/shop/1/plan.safetensors").is_file()


def test_the_deltas_of_the_page_are_published(folder: Path) -> None:
    write(folder, "dynamicemb", "dump")
    (folder / "shop.json").write_text(DESCRIPTION)
    shardrank("import", "dynamicemb", "dump", "--model", "shop.json", "--store", "models", "--checkpoint", "dense.pt")
    keys = list(TABLES["users"].keys[:2])
    row = {"global_step": [5, 5], "table_fqn": ["ebc.embedding_bags.users"] * 2, "key_id": keys}
    row |= {"embedding": pa.array([[1.0] * 4, [2.0] * 4], pa.list_(pa.float32()))}
    (folder / "delta_embedding_dump").mkdir()
    pq.write_table(pa.table(row), folder / "delta_embedding_dump" / "delta_embedding_step_5.parquet")
    assert "delta_embedding_step_5.parquet: step 5, rank 0: 2 rows" in run("Deltas")


@pytest.mark.nightly
def test_the_trainer_of_the_page_exports_and_publishes_what_it_changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (program,) = blocks(SECTIONS["In training"], "python")
    (folder / "train.py").write_text(program)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    publish, published = DeltaPublisher.publish, dict[str, dict[int, list[float]]]()

    def noted(self: DeltaPublisher, table: str, rows: Any, values: Any) -> int:
        published.setdefault(table, {}).update(zip(rows.tolist(), values.tolist(), strict=True))
        return publish(self, table, rows, values)

    monkeypatch.setattr(DeltaPublisher, "publish", noted)
    trained = runpy.run_path("train.py")["tables"]
    after = {name: table.weight.detach().numpy() for name, table in trained.items()}
    assert published.keys() == after.keys()
    for name, rows in published.items():
        assert len(rows) > 400
        assert all(after[name][row].tolist() == values for row, values in rows.items())
