"""`shardrank loadtest report`: files in, a page out."""

from __future__ import annotations

import importlib.util
import re

import pytest
from click.testing import CliRunner

from loader.errors import ConfigError
from loadtest.cli import loadtest
from loadtest.documents import write_document
from loadtest.page import read_reported
from shardrank_testing.load_results import QueueLoad, example_sweep


def short(**changes):
    return QueueLoad(**{"duration_s": 2, "warmup_s": 1, "rate": 200.0, **changes}).run()


def report(*arguments):
    return CliRunner().invoke(loadtest, ["report", *map(str, arguments)], catch_exceptions=True)


def saved(folder, name, result):
    path = folder / name
    write_document(result, path)
    return path


@pytest.mark.parametrize(
    ("results", "title"),
    [
        ({"run.json": short}, "dlrm-v2:0.001 over json, http://127.0.0.1:8000"),
        ({"a=b.json": short}, "dlrm-v2:0.001 over json, http://127.0.0.1:8000"),
        ({"sweep.json": example_sweep}, "dlrm-v2:0.001 over json, http://127.0.0.1:8000"),
        ({"before.json": short, "after.json": short}, "before against after"),
    ],
)
def test_results_become_a_page(tmp_path, results, title):
    """One its own, several a comparison of as many arms."""
    files = [saved(tmp_path, name, make()) for name, make in results.items()]
    result = report(*files, "--html", tmp_path / "out.html")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "out.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>\n")
    assert f"<h1>{title}</h1>" in page
    assert ("<th>ratio to before</th>" in page) == (len(files) == 2)


def test_files_of_one_name_are_rounds(tmp_path):
    files = [
        f"{name}={saved(tmp_path, f'{name}{turn}.json', short(seed=turn, service_ms=ms))}"
        for turn in range(3)
        for name, ms in (("one", 1.5), ("two", 0.8))
    ]
    compared = tmp_path / "compared.json"
    result = report(*files, "--html", tmp_path / "out.html", "--json", compared, "--title", "cards")
    assert result.exit_code == 0, result.output
    comparison = read_reported(compared)
    assert ([arm.name for arm in comparison.arms], comparison.rounds, comparison.title) == (["one", "two"], 3, "cards")
    assert [run.seed for run in comparison.arms[0].runs] == [0, 1, 2]
    assert report(compared, "--html", tmp_path / "again.html").exit_code == 0
    assert "<h1>cards</h1>" in (tmp_path / "again.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run.json", "a/run.json"], "give each a name"),
        (["run.json", "--json", "o.json"], "at least two files"),
        (["=", "run.json"], "expected FILE or NAME=FILE"),
        (["run.json", "sweep.json"], "sweep.json: a sweep; only runs can be compared"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    for name, result in (("run.json", short()), ("a/run.json", short()), ("sweep.json", example_sweep())):
        saved(tmp_path, name, result)
    result = report(*arguments, "--html", "out.html")
    assert isinstance(result.exception, ConfigError) or result.exit_code == 2
    assert message in f"{result.output}{result.exception}"


def test_a_page_is_refused_at_once_without_its_extra(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    for command in (["report", "none.json"], ["run", "--target", "http://127.0.0.1:1"], ["peers"]):
        result = CliRunner().invoke(loadtest, [*command, "--html", str(tmp_path / "out.html")])
        assert result.exit_code == 2
        assert "pip install 'shardrank[report]'" in result.output


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("{", "is no result of a run, a sweep or a comparison"),
        ('{"kind": "other"}', "is no result of a run, a sweep or a comparison"),
        ('{"kind": "sweep", "steps": []}', r"sweep\.slo_ms: Field required"),
    ],
)
def test_a_file_that_is_no_result_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "other.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=f"{re.escape(str(path))}.*{message}"):
        read_reported(path)


def test_an_unknown_key_of_a_result_is_refused(tmp_path):
    path = saved(tmp_path, "run.json", short())
    path.write_text(path.read_text().replace('"max_in_flight"', '"max_flight"'))
    with pytest.raises(ConfigError, match="unknown key 'max_flight'; allowed are"):
        read_reported(path)
