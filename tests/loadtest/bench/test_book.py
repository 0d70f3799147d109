"""The textbook's draw comes out exactly, and its practical example is measured on served scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.bench import book
from shardrank_testing.command_line import shardrank


def medians_of(name: str, folder: Path, *arguments: object, code: int | None = 0) -> tuple[dict[str, Any], str]:
    """Return the medians by measure and subject, and what was printed."""
    file = folder / "result.json"
    result = shardrank("loadtest", "bench", name, "--book", *arguments, "--json", file, code=code)
    (table,) = json.loads(file.read_text())["tables"].values()
    measures = next(iter(table["subjects"].values()))
    found = {of: [subject[of]["median"] for subject in table["subjects"].values()] for of in measures}
    return found, result.output


def test_the_draw_has_the_hits_and_bytes_of_the_chapter(tmp_path: Path) -> None:
    """Of caches of no rows, 100, 1,000 and 5,000."""
    found, text = medians_of("hot-rows", tmp_path)
    assert found["hit rate"] == [0, 0.5762, 0.7514, 0.85035]
    assert [round(size, 1) for size in found["moved"]] == [1342.2, 568.8, 333.7, 200.9]
    assert [round(time, 2) for time in found["time"]] == [13.42, 5.69, 3.34, 2.01]
    assert [round(hit_rate, 3) for hit_rate in found["LRU hit rate"]] == [0, 0.448, 0.653, 0.731]
    assert "568.8" in text


@pytest.mark.parametrize(("exponent", "points"), [(1.3, 6.2), (1.1, 9.8), (0.6, 16.1)])
def test_lru_lags_more_the_flatter_the_head_is(exponent: float, points: float) -> None:
    rows = book.drawn_rows(2 * 10**9, exponent)
    gap = sum(row < 1000 for row in rows) - book.lru_hits(rows, 1000)
    assert round(100 * gap / book.DRAWN, 1) == points


def test_lru_evicts_the_least_recently_used() -> None:
    assert book.lru_hits([1, 2, 1, 3, 1, 2, 3], 2) == 2
    assert book.lru_hits([1, 2, 1, 3, 1, 2, 3], 3) == 4
    assert book.lru_hits([1, 1], 0) == 0


SMALL = ("--rounds", 1, "--ratings", 1000, "--epochs", 1)


@pytest.mark.parametrize(
    ("auc", "moved", "problem"),
    [
        (0.6995, 2000, ""),
        (0.698, 2000, "20.0% of the bytes are moved, and AUC is 0.0020 lower"),
        (0.7, 2100, "21.0% of the bytes are moved, and AUC is 0.0000 lower"),
    ],
)
def test_what_exceeds_the_books_limits_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, auc: float, moved: float, problem: str
) -> None:
    """Scores and bytes are given here; models and their rows are real."""

    async def measure_served(version: object, wire_dtype: str, **_: object) -> dict[str, float]:
        is_plain = wire_dtype == "float32"
        return {"AUC": 0.7 if is_plain else auc, book.MOVED: 1e4 if is_plain else moved, "hit rate": 0.0}

    monkeypatch.setattr(book, "measure_served", measure_served)
    found, text = medians_of("levers", tmp_path, *SMALL, code=1 if problem else 0)
    assert ("not as the textbook says" in text, problem in text) == (bool(problem), True)
    assert found[book.FOOTPRINT][1] == (16 + 8) / (4 * 16)
    # A twentieth of the rows stays as it is.
    plain, levered = found[book.ROWS]
    assert levered / plain == pytest.approx(0.05 + 0.95 * 0.375, abs=0.01)


@pytest.mark.nightly
def test_levers_move_a_fifth_and_keep_auc(tmp_path: Path) -> None:
    found, _ = medians_of("levers", tmp_path, "--rounds", 1, "--ratings", 20_000, "--hot-share", 0.1)
    assert 0.6 < found["AUC"][0] == pytest.approx(found["AUC"][1], abs=0.001)
    assert found[book.MOVED][1] < 0.2 * found[book.MOVED][0]
    assert (found["hit rate"][0], found["hit rate"][1] > 0.5) == (0, True)


@pytest.mark.parametrize("name", ["hot-rows", "levers"])
def test_only_the_book_can_be_run(name: str) -> None:
    assert "Missing option '--book'" in shardrank("loadtest", "bench", name, code=2).output
