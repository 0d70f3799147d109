"""The command line itself: help, usage errors, errors, plugins. Nothing here starts a server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

import serving.cli as group
from serving.cli import main
from shardrank_testing.command_line import flags_of, shardrank
from shardrank_testing.snapshots import make_spec, write_snapshot

ALL = list(group.COMMANDS)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    write_snapshot(folder, make_spec())
    return folder


def test_help_lists_every_command_and_imports_no_heavy_library() -> None:
    script = (
        "import sys, click\nfrom serving.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'grpc', 'fastapi', 'pydantic'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
    for command in ALL:
        assert f"\n  {command} " in result.stdout


@pytest.mark.parametrize("command", ALL)
def test_every_command_has_help_with_examples_that_parse(command: str) -> None:
    result = shardrank(command, "--help")
    examples = re.findall(rf"^ +shardrank {command}\b(.*(?:\\\n.*)*)", result.output, re.MULTILINE)
    assert examples
    for example in examples:
        assert set(re.findall(r"--[a-z-]+", example)) <= flags_of(main, f"{command} {example}")


@pytest.mark.parametrize("command", ["verify", "inspect"])
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nope", ": there is no such folder"),
        ("empty", " has no model"),
        ("store", " has no model; not finished: the export of shop/1, which goes on when it is run again"),
    ],
)
def test_an_error_is_one_line_and_exit_code_1(command: str, name: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "store" / "shop" / ".export-1").mkdir(parents=True)
    assert shardrank(command, "--store", tmp_path / name, code=1).output == f"error: store {tmp_path / name}{problem}\n"


def test_inspect_tells_the_same_as_text_and_as_json(store: Path) -> None:
    document = json.loads(shardrank("inspect", "--store", store, "--json").output)
    assert (document["model"], document["version"]) == ("films", 1)
    assert document["float32_bytes"] == 4 * (1000 * 16 + 777 * 16 + 19 * 8 + 257 * 8 + 300 * 4)
    assert document["snapshot_bytes"] == sum(
        path.stat().st_size
        for path in (store / "films" / "1").rglob("*")
        if "manifest" not in path.name and path.is_file()
    )
    assert {table["name"]: table["dtype"] for table in document["tables"]} == {
        "user": "int8", "film": "int8", "genre": "fp32", "tag": "int4", "city": "fp16",
    }  # fmt: skip
    text = shardrank("inspect", "--snapshot", store / "films" / "1").output
    for table in document["tables"]:
        assert re.search(rf"{table['name']} +{table['num_embeddings']} +{table['embedding_dim']} ", text)


def test_a_store_with_several_models_wants_one_named(store: Path, tmp_path: Path) -> None:
    for model in ("a", "b"):
        write_snapshot(tmp_path, make_spec(model))
    result = shardrank("inspect", "--store", tmp_path, code=2)
    assert "name one with --model: ['a', 'b']" in result.output


def test_another_package_can_add_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    point = EntryPoint("lunch", f"{__name__}:lunch", group.PLUGIN_GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda self: lunch)
    monkeypatch.setattr(group, "entry_points", lambda group: [point])
    assert "lunch" in shardrank("--help").output
    assert shardrank("lunch").output == "soup\n"


@click.command()
def lunch() -> None:
    """Eat."""
    click.echo("soup")
