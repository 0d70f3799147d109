"""The command line itself, and what pages tell people to type. Nothing here starts a server."""

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
from serving.embedded import Ranker
from serving.training.dataset import generate_interactions
from serving.training.trainer import train_version
from shardrank_testing.command_line import blocks, flags_of, shardrank
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
        "print(sorted({'torch', 'numpy', 'grpc', 'fastapi'} & sys.modules.keys()))"
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


@pytest.mark.parametrize("command", ["up", "serve", "shard-node"])
def test_options_of_processes_are_shown_in_groups(command: str) -> None:
    text = shardrank(command, "--help").output
    titles = re.findall(r"^([A-Z][A-Za-z ]+):$", text, re.MULTILINE)
    assert titles == ["Basics", "Memory", "Cards", "Network and TLS", "Observing"]
    assert text.index("--store ") < text.index("--pinned-memory-gb") < text.index("--device") < text.index("--tls-cert")
    assert text.index("--tls-cert") < text.index("--log-format")


@pytest.mark.parametrize(
    ("words", "variable", "level"),
    [
        ("up", "", "info"),
        ("up", "debug", "debug"),
        ("--log-level error up", "debug", "error"),
        ("--log-level error up --log-level warning", "debug", "warning"),
    ],
)
def test_the_log_level_may_come_before_the_command_or_after(
    words: str, variable: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDRANK_LOG_LEVEL", variable)
    assert f'log_level = "{level}"\n' in shardrank(*words.split(), "--print-config").output


@pytest.mark.parametrize("words", ["--log-format json verify", "verify --log-format json"])
def test_the_error_of_a_command_is_in_the_format_of_logs(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = json.loads(shardrank(*words.split(), "--store", "nosuch", code=1).stderr)
    assert (line["level"], line["message"]) == ("error", "error: store nosuch: there is no such folder")


@pytest.mark.parametrize("command", ["verify", "inspect"])
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("stor", ": there is no such folder; beside it are ['store']"),
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


ROOT = Path(__file__).resolve().parents[3]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "deploy/README.md",
    "docs/serving-your-own-model.md",
    "docs/dense-models.md",
    "docs/levers.md",
    "docs/nvlink.md",
    "docs/plan.md",
    "docs/tls-and-tokens.md",
    "docs/traces.md",
]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_on_a_page_has_the_flags_that_it_is_given(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    context = click.Context(main)
    for name, rest in re.findall(r"shardrank ([a-z]+(?:-[a-z]+)*)\b([^`|]*)", text):
        if main.get_command(context, name) is None:
            assert name not in main.list_commands(context)
            continue
        line = rest.partition("\n")[0]
        assert set(re.findall(r"--[a-z][a-z-]+", line)) <= flags_of(main, f"{name} {line}")


@pytest.mark.parametrize("page", PAGES)
def test_every_link_on_a_page_leads_to_a_file(page: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)#]+)", text)
    missing = [one for one in targets if "://" not in one and not (ROOT / page).parent.joinpath(one).exists()]
    assert missing == []


def test_readme_has_the_two_set_up_commands_on_lines_of_their_own() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert "pip install -c constraints.txt . && shardrank demo" in lines
    assert "pip install -c constraints.txt '.[test]' && scripts/test" in lines


def test_readmes_request_is_answered_in_the_form_that_it_shows(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    body = re.search(r"-d '(\{.*?\})'", text, re.DOTALL)
    assert body is not None
    shown = json.loads(blocks(text, "json")[0])
    # As large as the demo's own data, so that the ids exist; hardly trained, as only the form is compared.
    version = train_version(generate_interactions(2000), tmp_path, seed=0, epochs=1)
    with Ranker.open(version.folder) as ranker:
        scores = ranker.rank("films", **json.loads(body[1])).scores
    assert scores.size == len(shown["scores"]) == 3
    assert sorted(shown["order"], key=lambda position: -shown["scores"][position]) == shown["order"]


def test_the_page_of_python_names_shows_ids_that_are_strings(tmp_path: Path) -> None:
    script = blocks((ROOT / "docs/python.md").read_text(encoding="utf-8"), "python")[-1]
    done = subprocess.run((sys.executable, "-c", script), cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True)
    assert re.fullmatch(r"\[0\.\d+ +0\.\d+ *\]\n", done.stdout)
