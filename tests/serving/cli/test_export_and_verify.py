"""`train`, `export` and `verify` from the command line, down to their exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file, save_file

from serving.embedded import Ranker
from serving.models.layers import bfloat16_is_native
from shardrank_testing.command_line import shardrank
from shardrank_testing.snapshots import rewrite_manifest

SPEC: dict[str, Any] = {
    "model": "shop",
    "tables": [
        {
            "name": "users", "num_embeddings": 3, "embedding_dim": 4, "feature_names": ["user"], "dtype": "fp32",
            "id_mapping": {"kind": "vocabulary", "id_type": "string"},
        },
        {
            "name": "items", "num_embeddings": 300, "embedding_dim": 4, "feature_names": ["item"],
            "id_mapping": {"kind": "vocabulary"}, "unknown_id": "skip",
        },
    ],
    "features": [{"name": "user", "side": "context"}, {"name": "item", "side": "candidate"}],
    "dense_model": {"kind": "mlp", "config": {"hidden": [2]}},
}  # fmt: skip


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tensors = {
        "model.ebc.embedding_bags.users.weight": torch.randn(3, 4),
        "rows_of_items": torch.randn(300, 4),
        "over.mlp.layers.0.weight": torch.randn(2, 8),
        "over.mlp.layers.0.bias": torch.randn(2),
        "over.mlp.layers.1.weight": torch.randn(1, 2),
        "over.mlp.layers.1.bias": torch.randn(1),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "shop.json").write_text(json.dumps(SPEC))
    (tmp_path / "users.txt").write_text("anna\nbert\ncäcilie\n", encoding="utf-8")
    (tmp_path / "items.txt").write_text("".join(f"{10 * number}\n" for number in range(300)))
    return tmp_path


def export(inputs: Path, *more: object, code: int = 0) -> Result:
    return shardrank(
        "export", "--checkpoint", inputs / "model.safetensors", "--model", inputs / "shop.json",
        "--store", inputs / "models", "--table-key", "items=rows_of_items", "--dense-prefix", "over.",
        "--vocabulary", f"users={inputs / 'users.txt'}", "--vocabulary", f"items={inputs / 'items.txt'}", *more,
        code=code,
    )  # fmt: skip


def test_a_checkpoint_with_foreign_names_becomes_a_version(inputs: Path) -> None:
    result = export(inputs, "--metadata", "run=17", "--version", 4)
    folder = inputs / "models" / "shop" / "4"
    assert f"wrote {folder}" in result.output
    assert json.loads(shardrank("inspect", "--snapshot", folder, "--json").output)["metadata"] == {"run": "17"}
    with Ranker.open(folder) as ranker:
        answer = ranker.rank(
            {"context": {"sparse": {"user": ["cäcilie"]}}, "candidates": {"sparse": {"item": [0, 2990, 7]}}}
        )
    assert len(answer["scores"]) == 3


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("shop.json", "{", "shop.json: document: Invalid JSON"),
        ("shop.json", json.dumps({**SPEC, "tabels": []}), "unknown key 'tabels'; allowed are ['model', 'tables', "),
        ("shop.json", json.dumps({**SPEC, "dense_model": {"kind": "oracle"}}), "dense_model 'oracle'"),
        ("items.txt", "1\n2\nthree\n", "items.txt, line 3: 'three' is not a whole number below 2^63"),
        ("items.txt", "1\n1\n", "table 'items': vocabulary: rows 0 and 1 have the same id"),
        ("users.txt", "a\nb\nc\nd\n", "table 'users': vocabulary of 4 ids"),
        ("model.safetensors", "rubbish", "can't be read as safetensors"),
    ],
)
def test_a_bad_input_is_named_and_nothing_is_written(inputs: Path, file: str, content: str, problem: str) -> None:
    (inputs / file).write_text(content)
    result = export(inputs, code=1)
    assert result.output.startswith("error: ")
    assert problem in result.output
    assert not list((inputs / "models").rglob("manifest.json"))


@pytest.mark.parametrize(
    ("renamed", "prefix", "problem"),
    [
        (lambda name: None if name.endswith("1.bias") else name, "over.", "missing tensors: ['mlp.layers.1.bias']\n"),
        (lambda name: name, "over", "the names fit with --dense-prefix over.\n"),
        (lambda name: name, "over.mlp.", "the names fit with --dense-prefix over.\n"),
        (lambda name: name, "top.", "no key below it;"),
        (lambda name: name, "top.", "the names fit with --dense-prefix over.\n"),
        (lambda name: name.replace("over.", "a.over."), "over.", "the names fit with --dense-prefix a.over.\n"),
        (lambda name: name.removeprefix("over."), "over.", "the names fit without --dense-prefix\n"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_a_row_is_written(
    inputs: Path, renamed: Callable[[str], str | None], prefix: str, problem: str
) -> None:
    tensors = load_file(inputs / "model.safetensors")
    kept = {new: tensor for name, tensor in tensors.items() if (new := renamed(name)) is not None}
    save_file(kept, inputs / "model.safetensors")
    assert problem in export(inputs, "--dense-prefix", prefix, code=1).output
    assert not (inputs / "models").exists()


def test_verify_says_yes_with_0_and_no_with_1_and_the_reason(inputs: Path) -> None:
    export(inputs)
    folder = inputs / "models" / "shop" / "1"
    document = json.loads(shardrank("verify", "--store", inputs / "models", "--json").stdout)
    assert (document["ok"], document["model"], document["golden_checked"]) == (True, "shop", False)

    rows = folder / "tables" / "items" / "rows-00000-of-00001.safetensors"
    content = bytearray(rows.read_bytes())
    content[-1] ^= 1
    rows.write_bytes(content)
    bad = shardrank("verify", "--snapshot", folder, code=1)
    assert "SHA-256" in bad.stdout
    assert "must not be served" in bad.stdout
    assert json.loads(shardrank("verify", "--snapshot", folder, "--json", code=1).stdout)["ok"] is False


def test_verify_scores_the_golden_requests_of_a_trained_version(tmp_path: Path) -> None:
    small = ("--ratings", 1500, "--epochs", 1, "--profile", "--kind", "dcn_v2", "--dtype", "int4")
    trained = shardrank("train", "--store", tmp_path, *small)
    folder = tmp_path / "films" / "1"
    assert f"wrote {folder}" in trained.output
    good = json.loads(shardrank("verify", "--store", tmp_path, "--json").stdout)
    assert (good["ok"], good["golden_checked"]) == (True, True)
    told = [check for check in good["checks"] if check.startswith("dense model in ")]
    assert told[0].startswith("dense model in float32: golden scores differ by up to 0.0")
    # It has no layer that gains by int8, so that is no format of its own.
    assert [check.split()[3] for check in told] == ["float32:", *(["bfloat16:"] if bfloat16_is_native() else [])]
    rewrite_manifest(folder, lambda manifest: manifest["golden"].update(tolerance=1e-9))
    bad = shardrank("verify", "--store", tmp_path, code=1)
    assert "bad: golden_mismatch: model 'films' version 1: golden scores differ" in bad.stdout
    shardrank("verify", "--store", tmp_path, "--no-golden")
