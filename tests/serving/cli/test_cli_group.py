"""The command line itself: help, usage errors, errors, plugins. Nothing here starts a server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import serving.cli as group
from serving.cli import main
from shardrank_testing.command_line import flags_of
from shardrank_testing.snapshots import make_spec, write_snapshot

ALL = list(group.COMMANDS)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    write_snapshot(folder, make_spec())
    return folder


def run(*arguments: str) -> click.testing.Result:
    return CliRunner().invoke(main, list(arguments), prog_name="shardrank")


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
    result = run(command, "--help")
    assert result.exit_code == 0
    examples = re.findall(rf"^ +shardrank {command}\b(.*(?:\\\n.*)*)", result.output, re.MULTILINE)
    assert examples
    for example in examples:
        assert set(re.findall(r"--[a-z-]+", example)) <= flags_of(main, f"{command} {example}")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("inspect",), "Name a snapshot"),
        (("inspect", "--store", "a", "--snapshot", "b"), "leave out --store"),
        (("shard-node", "--store", "a", "--listen", "b:1", "--shard", "2/2"), "'2/2' is not I/N with 0 <= I < N"),
        (("shard-node", "--store", "a", "--listen", "b:1", "--shard", "x"), "'x' is not I/N"),
        (("serve", "--store", "a", "--limit", "max_candidates"), "'max_candidates' is not NAME=VALUE"),
        (("demo", "--sharding", "sideways"), "is not one of"),
    ],
)
def test_flags_that_make_no_sense_exit_with_2_and_say_why(arguments: tuple[str, ...], problem: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert problem in result.output


def test_an_error_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    result = run("inspect", "--store", str(tmp_path), "--model", "films")
    assert result.exit_code == 1
    assert result.output == f"error: store {tmp_path} has no model\n"


def test_a_store_that_is_not_there_or_has_only_an_unfinished_export_is_told_as_that(tmp_path: Path) -> None:
    (tmp_path / "shop" / ".export-1").mkdir(parents=True)
    for command in ("verify", "inspect"):
        assert run(command, "--store", str(tmp_path / "nope")).output == (
            f"error: store {tmp_path / 'nope'}: there is no such folder\n"
        )
        assert "not finished: the export of shop/1" in run(command, "--store", str(tmp_path)).output


def test_inspect_tells_the_same_as_text_and_as_json(store: Path) -> None:
    document = json.loads(run("inspect", "--store", str(store), "--json").output)
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
    text = run("inspect", "--snapshot", str(store / "films" / "1")).output
    for table in document["tables"]:
        assert re.search(rf"{table['name']} +{table['num_embeddings']} +{table['embedding_dim']} ", text)


def test_a_store_with_several_models_wants_one_named(store: Path, tmp_path: Path) -> None:
    for model in ("a", "b"):
        write_snapshot(tmp_path, make_spec(model))
    result = run("inspect", "--store", str(tmp_path))
    assert result.exit_code == 2
    assert "name one with --model: ['a', 'b']" in result.output


def test_another_package_can_add_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    point = EntryPoint("lunch", f"{__name__}:lunch", group.PLUGIN_GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda self: lunch)
    monkeypatch.setattr(group, "entry_points", lambda group: [point])
    assert "lunch" in run("--help").output
    assert run("lunch").output == "soup\n"


@click.command()
def lunch() -> None:
    """Eat."""
    click.echo("soup")
