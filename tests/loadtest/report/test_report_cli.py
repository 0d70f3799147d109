"""`shardrank loadtest report`: files in, a page out."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from loadtest.errors import ComparisonError, ResultFileError
from loadtest.load.cli import loadtest
from loadtest.load.result import write_document
from loadtest.report.comparison import Comparison
from loadtest.report.page import html, read_reported
from shardrank_testing.load_results import QueueLoad, example_sweep
from shardrank_testing.report_pages import body_of, text_of


def short(**changes):
    return QueueLoad(**{"duration_s": 2, "warmup_s": 1, "rate": 200.0, **changes}).run()


def report(*arguments):
    return CliRunner().invoke(loadtest, ["report", *map(str, arguments)], catch_exceptions=True)


def saved(folder, name, result):
    path = folder / name
    write_document(result, path)
    return path


def test_a_run_becomes_its_page(tmp_path):
    run = short()
    found = report(saved(tmp_path, "run.json", run), "--html", tmp_path / "run.html")
    assert found.exit_code == 0, found.output
    assert (tmp_path / "run.html").read_text() == html(run)


def test_a_sweep_becomes_its_page(tmp_path):
    sweep = example_sweep()
    assert report(saved(tmp_path, "sweep.json", sweep), "--html", tmp_path / "out.html").exit_code == 0
    assert (tmp_path / "out.html").read_text() == html(sweep)


def test_several_runs_are_compared_with_the_first(tmp_path):
    files = [saved(tmp_path, f"{name}.json", short(service_ms=ms)) for name, ms in (("before", 1.5), ("after", 0.8))]
    found = report(*files, "--html", tmp_path / "out.html")
    assert found.exit_code == 0, found.output
    text = text_of(body_of((tmp_path / "out.html").read_text()))
    assert "before against after" in text
    assert "as ratios to before" in text


def test_files_of_one_name_are_rounds(tmp_path):
    files = [
        f"{name}={saved(tmp_path, f'{name}{turn}.json', short(seed=turn, service_ms=ms))}"
        for turn in range(3)
        for name, ms in (("one", 1.5), ("two", 0.8))
    ]
    compared = tmp_path / "compared.json"
    found = report(*files, "--html", tmp_path / "out.html", "--json", compared, "--title", "cards")
    assert found.exit_code == 0, found.output
    read = read_reported(compared)
    assert isinstance(read, Comparison)
    assert ([arm.name for arm in read.arms], read.rounds, read.title) == (["one", "two"], 3, "cards")
    assert [run.seed for run in read.arms[0].runs] == [0, 1, 2]
    again = tmp_path / "again.html"
    assert report(compared, "--html", again).exit_code == 0
    assert again.read_text() == (tmp_path / "out.html").read_text()


def test_two_files_without_a_name_that_are_called_alike_need_one(tmp_path):
    (tmp_path / "a").mkdir()
    files = [saved(folder, "run.json", short()) for folder in (tmp_path, tmp_path / "a")]
    found = report(*files, "--html", tmp_path / "out.html")
    assert found.exit_code == 2
    assert "give each a name" in found.output


def test_a_comparisons_json_needs_a_comparison(tmp_path):
    found = report(saved(tmp_path, "run.json", short()), "--html", tmp_path / "o.html", "--json", tmp_path / "o.json")
    assert found.exit_code == 2
    assert "at least two files" in found.output


def test_a_sweep_can_not_be_compared(tmp_path):
    files = [saved(tmp_path, "run.json", short()), saved(tmp_path, "sweep.json", example_sweep())]
    assert isinstance(report(*files, "--html", tmp_path / "out.html").exception, ComparisonError)


def test_a_file_whose_name_has_an_equals_sign_is_a_file(tmp_path):
    assert report(saved(tmp_path, "a=b.json", short()), "--html", tmp_path / "out.html").exit_code == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "no result of a run, a sweep or a comparison"),
        ("{}", "no result of a run, a sweep or a comparison"),
        ('{"kind": "other"}', "no result of a run, a sweep or a comparison"),
        ('{"kind": "sweep", "steps": []}', r"sweep\.slo_ms: Field required"),
    ],
)
def test_a_file_that_is_no_result_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ResultFileError, match=message) as caught:
        read_reported(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ResultFileError, match=r"none\.json: No such file"):
        read_reported(tmp_path / "none.json")


def test_an_unknown_key_is_refused_with_those_that_are_allowed(tmp_path):
    path = saved(tmp_path, "run.json", short())
    path.write_text(path.read_text().replace('"goodput"', '"good_put"'))
    with pytest.raises(ResultFileError, match="unknown key 'good_put'; allowed are"):
        read_reported(path)
