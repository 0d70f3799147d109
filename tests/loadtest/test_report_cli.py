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


@pytest.mark.parametrize("make", [short, example_sweep])
def test_a_result_becomes_a_page(tmp_path, make):
    result = report(saved(tmp_path, "run.json", make()), "--html", tmp_path / "out.html")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "out.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>\n")
    assert "<h1>dlrm-v2:0.001 over json, http://127.0.0.1:8000</h1>" in page


def test_a_page_is_refused_at_once_without_its_extra(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    for command in (["report", "none.json"], ["run", "--target", "http://127.0.0.1:1"]):
        result = CliRunner().invoke(loadtest, [*command, "--html", str(tmp_path / "out.html")])
        assert result.exit_code == 2
        assert "pip install 'shardrank[report]'" in result.output


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("{", "is no result of a run or a sweep"),
        ('{"kind": "other"}', "is no result of a run or a sweep"),
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
