"""Reads the files of MovieLens 100K (GroupLens): u.data, u.item, u.user and u.genre."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from serving.training.errors import DatasetError
from serving.training.interactions import Films, Interactions, Users, genres_of_flags
from shard_node.bags import Int64Array

# Some two hundred times the real files: a folder with something else is refused before it is read.
MAX_FILE_BYTES = 512 * 1024 * 1024
MAX_RATING = 5
_FIELDS_BEFORE_GENRES = 5
_YEAR = re.compile(r"\((\d{4})\)\s*$")


def read_movielens(folder: str | Path) -> Interactions:
    """Reads the dataset from a folder.

    Raises:
        DatasetError: a file is missing, too large, empty or malformed; the message names file and line.
    """
    folder = Path(folder)
    genres = _read_genres(folder / "u.genre")
    films = _read_films(folder / "u.item", genres)
    users = _read_users(folder / "u.user")
    path = folder / "u.data"
    rows: list[list[int]] = []
    for line, fields in _lines(path, "\t", 4):
        row = [_whole(path, line, name, text) for name, text in zip(_RATING_FIELDS, fields, strict=True)]
        if not 1 <= row[2] <= MAX_RATING:
            raise _malformed(path, line, f"rating {row[2]} is not in 1..{MAX_RATING}")
        rows.append(row)
    table = np.array(rows, np.int64)
    return Interactions(
        source="movielens-100k",
        users=users,
        films=films,
        user_index=_positions(path, "user id", table[:, 0], users.ids, "u.user"),
        film_index=_positions(path, "film id", table[:, 1], films.ids, "u.item"),
        ratings=table[:, 2].astype(np.float32),
        timestamps=table[:, 3].copy(),
    )


_RATING_FIELDS = ("user id", "film id", "rating", "timestamp")


def _read_genres(path: Path) -> tuple[str, ...]:
    names: list[str] = []
    for line, (name, number) in _lines(path, "|", 2):
        if _whole(path, line, "genre number", number) != len(names):
            raise _malformed(path, line, f"genre number {number} is not {len(names)}, the next one")
        names.append(name)
    return tuple(names)


def _read_films(path: Path, genres: tuple[str, ...]) -> Films:
    ids: list[int] = []
    titles: list[str] = []
    years: list[int] = []
    flags: list[list[bool]] = []
    for line, fields in _lines(path, "|", _FIELDS_BEFORE_GENRES + len(genres)):
        ids.append(_whole(path, line, "film id", fields[0]))
        titles.append(fields[1])
        year = _YEAR.search(fields[1])
        years.append(int(year[1]) if year else 0)
        film_flags = fields[_FIELDS_BEFORE_GENRES:]
        if unknown := set(film_flags) - {"0", "1"}:
            raise _malformed(path, line, f"genre flags {sorted(unknown)} are not 0 or 1")
        flags.append([flag == "1" for flag in film_flags])
    order = _ascending(path, "film id", ids)
    offsets, genre_ids = genres_of_flags(np.array(flags, bool)[order])
    return Films(
        ids=np.array(ids, np.int64)[order],
        titles=tuple(titles[i] for i in order),
        years=np.array(years, np.int64)[order],
        genre_offsets=offsets,
        genre_ids=genre_ids,
        genre_names=genres,
    )


def _read_users(path: Path) -> Users:
    rows = [
        (_whole(path, line, "user id", number), _whole(path, line, "age", age), gender, occupation, zip_code)
        for line, (number, age, gender, occupation, zip_code) in _lines(path, "|", 5)
    ]
    rows = [rows[i] for i in _ascending(path, "user id", [row[0] for row in rows])]
    return Users(
        ids=np.array([row[0] for row in rows], np.int64),
        ages=np.array([row[1] for row in rows], np.int64),
        genders=tuple(row[2] for row in rows),
        occupations=tuple(row[3] for row in rows),
        zip_codes=tuple(row[4] for row in rows),
    )


def _lines(path: Path, separator: str, num_fields: int) -> Iterator[tuple[int, list[str]]]:
    """Line number (from 1) and fields of each line that is not empty."""
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise DatasetError(f"{path}: {size} bytes, allowed: {MAX_FILE_BYTES}")
        text = path.read_text(encoding="latin-1")
    except OSError as error:
        raise DatasetError(f"{path}: {error.strerror or error}") from error
    empty = True
    # Not splitlines: latin-1 text may hold characters (such as U+0085) that it takes for line ends.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        fields = line.rstrip("\r").split(separator)
        if len(fields) != num_fields:
            raise _malformed(path, number, f"{len(fields)} fields separated by {separator!r}, expected {num_fields}")
        empty = False
        yield number, fields
    if empty:
        raise DatasetError(f"{path}: holds no line")


def _whole(path: Path, line: int, name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise _malformed(path, line, f"{name} {text!r:.40} is not a whole number below 10^18")
    return int(text)


def _ascending(path: Path, name: str, ids: Sequence[int]) -> list[int]:
    order = sorted(range(len(ids)), key=ids.__getitem__)
    for before, after in itertools.pairwise(order):
        if ids[before] == ids[after]:
            raise DatasetError(f"{path}: {name} {ids[after]} is there twice")
    return order


def _positions(path: Path, name: str, wanted: Int64Array, ids: Int64Array, listed_in: str) -> Int64Array:
    positions = np.searchsorted(ids, wanted)
    unknown = ids[np.minimum(positions, ids.size - 1)] != wanted
    if unknown.any():
        row = int(unknown.argmax())
        raise DatasetError(f"{path}: rating {row + 1}: {name} {wanted[row]} is not in {listed_in}")
    return positions.astype(np.int64)


def _malformed(path: Path, line: int, problem: str) -> DatasetError:
    return DatasetError(f"{path}, line {line}: {problem}")
