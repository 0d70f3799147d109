"""Every benchmark runs with small sizes, and its JSON form has what its name says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import loadtest
from loadtest.servers import SERVED_PACKAGES
from serving.cli import main


@pytest.fixture
def bench(tmp_path: Path):
    """Run a benchmark; return its tables and its document."""

    def run(name: str, *flags: str, rounds: int = 1) -> tuple[dict[str, Any], dict[str, Any]]:
        file = tmp_path / "bench.json"
        arguments = ["loadtest", "bench", name, *flags, "--rounds", str(rounds), "--json", str(file)]
        result = CliRunner().invoke(main, arguments, catch_exceptions=False)
        assert file.exists(), result.output
        document = json.loads(file.read_text())
        # 1 if the client was the bottleneck.
        assert result.exit_code == (1 if document["problems"] else 0), result.output
        assert (document["kind"], document["bench"], document["rounds"]) == ("bench", name, rounds)
        for table in document["tables"].values():
            for measures in table["subjects"].values():
                assert {len(measured["values"]) for measured in measures.values()} == {rounds}
        return {title: table["subjects"] for title, table in document["tables"].items()}, document

    return run


def medians(subjects: dict[str, Any], name: str) -> dict[str, float]:
    return {subject: measures[name]["median"] for subject, measures in subjects.items()}


@pytest.mark.nightly
def test_lookup_compares_five_ways_to_read_the_same_rows(bench) -> None:
    """That all give the same is checked before they are measured."""
    tables, _ = bench("lookup", "--table-gb", "0.002", "--dim", "8", "--seconds", "0", rounds=2)
    assert list(tables) == [
        f"dim 8, {ids} a bag, batch {batch}" for ids in ("1 id", "20 ids") for batch in (1, 64, 512)
    ]
    for subjects in tables.values():
        times = medians(subjects, "time of a batch")
        assert list(times) == ["bare op", "local", "local, 2 cards", "Unix socket", "nn.EmbeddingBag fp32"]
        assert times["bare op"] < times["Unix socket"]


@pytest.mark.nightly
def test_deltas_are_applied_beside_lookups(bench) -> None:
    tables, _ = bench("deltas", "--seconds", "0.4", "--rows", "2000", "--rows-per-s", "1000", rounds=2)
    subjects = tables["lookups beside row updates"]
    assert medians(subjects, "rows applied")["with deltas"] > 100
    assert medians(subjects, "rows applied")["without deltas"] == 0
    assert min(medians(subjects, "lookups").values()) > 0


SMALL = ("--rows", "300", "--seconds", "0.15", "--hotness", "1", "--dtype", "float32", "--api", "json")


@pytest.mark.nightly
def test_serving_is_compared_with_the_same_batches_without_a_server(bench) -> None:
    tables, document = bench("serving", *SMALL)
    loaded, single, forms = tables.values()
    assert list(loaded) == ["without a server", "json"]
    assert loaded["json"]["CPU of a request"]["ratio"] > 0
    assert medians(loaded, "batch")["json"] == pytest.approx(medians(loaded, "batch")["without a server"], rel=0.5)
    times = single["json"]["p50"]["values"], single["without a server"]["p50"]["values"]
    beyond = [served - computed for served, computed in zip(*times, strict=True)]
    assert single["json"]["p50 beyond computing"]["values"] == pytest.approx(beyond)
    assert list(forms) == ["equal", "varied"]
    # A request is in its batch's stages for longer than its share of them.
    account = document["account"]["json"]
    assert 0 < sum(account["busy_us"].values()) <= account["whole_us"]
    assert account["busy_us"].keys() == account["stages_us"].keys() >= {"decode", "queue", "rank", "encode"}


@pytest.fixture
def checkout(tmp_path: Path):
    """Another folder with this code."""
    folder, this = tmp_path / "old", Path(loadtest.__file__).parents[1]
    folder.mkdir()
    for package in SERVED_PACKAGES:
        (folder / package).symlink_to(this / package)
    return folder


@pytest.mark.nightly
def test_two_checkouts_are_measured_in_alternation(bench, checkout: Path) -> None:
    tables, document = bench("serving", *SMALL, "--against", str(checkout))
    assert list(tables["mlp, 1 id a bag, json"]) == ["old", "new"]
    assert min(medians(tables["mlp, 1 id a bag, json"], "CPU of a request").values()) > 0
    assert document["tables"]["mlp, 1 id a bag, json"]["setup"]["old"] == "old, not under git"
    assert "account" not in document


@pytest.mark.nightly
def test_rows_by_keys_are_measured_against_a_vocabulary_of_the_same_ids(bench) -> None:
    """That both give the same scores is checked in each round."""
    tables, _ = bench("serving", *SMALL, "--keyed")
    assert list(tables["mlp, 1 id a bag, json"]) == ["vocabulary", "keys"]
    assert min(medians(tables["mlp, 1 id a bag, json"], "CPU of a request").values()) > 0


def test_the_old_server_runs_the_code_of_its_checkout(checkout: Path) -> None:
    (checkout / "serving").unlink()
    (checkout / "serving/cli").mkdir(parents=True)
    (checkout / "serving/__init__.py").touch()
    (checkout / "serving/cli/__main__.py").write_text("raise SystemExit('this is the old one')")
    result = CliRunner().invoke(main, ["loadtest", "bench", "serving", *SMALL, "--against", str(checkout)])
    assert result.exit_code == 1
    assert "has ended before it served" in result.output
    assert "this is the old one" in result.output
