"""What is not as the layout says is refused by file, table, what was expected and what found; nothing is executed."""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loader.errors import CheckpointError, ExportError
from loader.imports.kinds import Kind, open_import
from loader.imports.tables import JoinedRows, Part
from loader.snapshot.writer import export_snapshot
from shardrank_testing.foreign_checkpoints import (
    Saved,
    saved_table,
    write_dynamicemb,
    write_hps,
    write_npz,
    write_numpy,
    write_tfra,
    write_tzrec,
)
from shardrank_testing.snapshots import model_of, table_of

TABLES = {"films": saved_table(1, 40, 6), "shops": saved_table(2, 9, 4)}
ROWS = {"cities": saved_table(3, 11, 4, with_keys=False)}
NAMED = ".rank_{}.world_size_{}"


def open_all(kind: Kind, path: Path) -> None:
    checkpoint = open_import(kind, path)
    for name in checkpoint.names():
        checkpoint.keys(name)
        checkpoint.rows(name)


def refuse(kind: Kind, path: Path, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_all(kind, path)
    assert re.search(message, str(caught.value)), str(caught.value)


def cut_off(file: Path, size: int) -> None:
    os.truncate(file, file.stat().st_size - size)


def another_ranks_keys(at: Path) -> None:
    mine, other = (np.fromfile(at / f"model/films_emb_keys{NAMED.format(rank, 2)}", np.int64) for rank in (0, 1))
    mine[:1] = other[:1]
    mine.tofile(at / f"model/films_emb_keys{NAMED.format(0, 2)}")


def other_dim(at: Path) -> None:
    part = saved_table(9, 4, 5)
    assert part.keys is not None
    part.keys.tofile(at / f"model/films_emb_keys{NAMED.format(1, 2)}")
    part.rows.tofile(at / f"model/films_emb_values{NAMED.format(1, 2)}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda at: [file.unlink() for file in (at / "model").glob("films*rank_1*")],
            r"model: table 'model/films': expected keys and values of rank_1\.world_size_2, found no keys and no "
            r"values beside films_emb_keys\.rank_0\.world_size_2",
        ),
        (
            lambda at: (at / "model" / f"films_emb_values{NAMED.format(0, 2)}").unlink(),
            r"table 'model/films': expected keys and values of rank_0\.world_size_2, found no values",
        ),
        (
            lambda at: (at / "model" / f"films_emb_keys{NAMED.format(0, 2)}").unlink(),
            r"table 'model/films': expected keys and values of rank_0\.world_size_2, found no keys",
        ),
        (
            lambda at: (at / "model" / f"films_emb_keys{NAMED.format(7, 2)}").write_bytes(b""),
            r"table 'model/films': expected no part rank_7\.world_size_2; write into an empty folder, found one",
        ),
        (
            lambda at: write_dynamicemb(at, TABLES, 3),
            r"table 'model/films': expected no part rank_\d\.world_size_3; write into an empty folder, found one",
        ),
        (
            lambda at: cut_off(at / "model" / f"films_emb_values{NAMED.format(1, 2)}", 3),
            r"films_emb_values\.rank_1\.world_size_2: table 'model/films': "
            r"expected float32, 4 bytes each, found \d+ bytes",
        ),
        (
            lambda at: cut_off(at / "model" / f"films_emb_values{NAMED.format(1, 2)}", 4),
            r"films_emb_values\.rank_1\.world_size_2: table 'model/films': expected as many rows as the \d+ keys of "
            r"films_emb_keys\.rank_1\.world_size_2, found \d+ float32",
        ),
        (
            lambda at: cut_off(at / "model" / f"films_emb_keys{NAMED.format(1, 2)}", 8),
            r"films_emb_values\.rank_1\.world_size_2: table 'model/films': expected as many rows as the \d+ keys",
        ),
        (
            another_ranks_keys,
            r"films_emb_values\.rank_0\.world_size_2: table 'model.films': expected each key once, "
            r"found -?\d+ twice, also in .*films_emb_values\.rank_1\.world_size_2",
        ),
        (
            other_dim,
            r"films_emb_values\.rank_1\.world_size_2: table 'model\.films': expected float32 \[n, 6\] as in "
            r".*films_emb_values\.rank_0\.world_size_2, found float32 \[4, 5\]",
        ),
        (
            lambda at: (at / "model/films_opt_args.json").write_text('{"dist_type": "continuous"}'),
            r"films_opt_args\.json: table 'model/films': expected dist_type roundrobin or hash_roundrobin, found "
            r"continuous, whose keys are numbers within a rank",
        ),
        (
            lambda at: (at / "model/films_opt_args.json").write_text("{"),
            r"films_opt_args\.json: table 'model/films': can't be read",
        ),
        (
            lambda at: (at / "model/films_opt_args.json").write_text("[1]"),
            r"films_opt_args\.json: table 'model/films': expected an object, found list",
        ),
        (
            lambda at: (
                [
                    file.rename(file.with_name(file.name.partition(".")[0].replace("_emb", "")))
                    for file in (at / "model").glob("*rank_0*")
                ]
                and [file.unlink() for file in (at / "model").glob("*rank_1*")]
            ),
            r"no file <table>_emb_keys\.rank_R\.world_size_W; .*_keys is of DynamicEmb 25\.08 or earlier",
        ),
    ],
)
def test_files_of_dynamicemb_that_do_not_fit_are_refused(
    tmp_path: Path, change: Callable[[Path], object], message: str
) -> None:
    change(write_dynamicemb(tmp_path, TABLES, 2))
    refuse("dynamicemb", tmp_path, message)


def test_numbers_within_ranks_are_read_where_there_is_one_rank(tmp_path: Path) -> None:
    write_dynamicemb(tmp_path, TABLES, 1, "continuous")
    assert open_import("dynamicemb", tmp_path).names() == ["model.films", "model.shops"]


def test_a_name_of_any_number_of_ranks_costs_nothing(tmp_path: Path) -> None:
    for kind in ("keys", "values"):
        (tmp_path / f"t_emb_{kind}.rank_0.world_size_{10**18}").write_bytes(b"")
        (tmp_path / f"t_mht_1of{10**18}_rank0_size{10**18}-{kind}").write_bytes(b"")
    (tmp_path / f"sparse_embeddings-00-of-{10**18}.npz").write_bytes(b"")
    refuse("dynamicemb", tmp_path, rf"expected keys and values of rank_1\.world_size_{10**18}, found no keys")
    refuse("tfra", tmp_path, rf"expected keys and values of 2of{10**18}_rank0_size{10**18}, found no keys")
    refuse("tzrec", tmp_path, r"can't be read as an \.npz file")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda at: (at / "films/emb_vector").unlink(),
            r"films/emb_vector: table 'films': No such file or directory",
        ),
        (
            lambda at: cut_off(at / "films/key", 1),
            r"films/key: table 'films': expected int64, 8 bytes each, found 319 bytes",
        ),
        (
            lambda at: (at / "films/key").write_bytes(b""),
            r"films/emb_vector: table 'films': expected as many rows as the 0 keys of key, found 240 float32",
        ),
        (
            lambda at: np.zeros(40, np.int64).tofile(at / "films/key"),
            r"films/emb_vector: table 'films': expected each key once, found 0 twice$",
        ),
        (
            lambda at: (at / "films/key").unlink(),
            r"films/key: table 'films': No such file or directory",
        ),
        (
            lambda at: [
                file.rename(file.with_name("meta_data")) for kind in ("key", "emb_vector") for file in at.rglob(kind)
            ],
            r"neither it nor a folder below it has the files key and emb_vector; `meta_data` is of "
            r"Model\.embedding_dump, which is not read",
        ),
    ],
)
def test_files_of_hps_that_do_not_fit_are_refused(
    tmp_path: Path, change: Callable[[Path], object], message: str
) -> None:
    change(write_hps(tmp_path, TABLES))
    refuse("hps", tmp_path, message)


VARIABLES = "variables/TFRADynamicEmbedding"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda at: (at / VARIABLES / "films_mht_1of1_rank0_size2-keys.tmp").write_bytes(b""),
            r"films_mht_1of1_rank0_size2-keys\.tmp: was not written to its end",
        ),
        (
            lambda at: [file.unlink() for file in at.rglob("films_mht_1of1_rank1*")],
            rf"TFRADynamicEmbedding: table '{VARIABLES}/films': expected keys and values of 1of1_rank1_size2, found no",
        ),
        (
            lambda at: write_tfra(at, TABLES, 2, 2),
            rf"table '{VARIABLES}/films': expected no part 1of2_rank0_size2; write into an empty folder, found one",
        ),
        (
            lambda at: (at / VARIABLES / "films_mht_0of1_rank0_size2-keys").write_bytes(b""),
            rf"table '{VARIABLES}/films': expected (keys and values of|no part) \dof1_rank\d_size2.*, found",
        ),
        (
            lambda at: cut_off(at / VARIABLES / "films_mht_1of1_rank0_size2-values", 2),
            rf"films_mht_1of1_rank0_size2-values: table '{VARIABLES}/films': expected float32, 4 bytes",
        ),
        (
            lambda at: [file.unlink() for file in at.rglob("*_mht_*")],
            r"no file <name>_mht_IofN_rankR_sizeS-keys",
        ),
    ],
)
def test_files_of_tfra_that_do_not_fit_are_refused(
    tmp_path: Path, change: Callable[[Path], object], message: str
) -> None:
    change(write_tfra(tmp_path, TABLES, 2))
    refuse("tfra", tmp_path, message)


def rewritten(at: Path, *names: str, rank: int = 0, **arrays: Any) -> None:
    """Write the tables with keys of a rank anew, with other arrays, and without those of `names`."""
    file = at / f"sparse/sparse_dynamic_embedding-{rank:02d}-of-02.npz"
    with np.load(file) as there:
        kept = {name: there[name] for name in there.files if name not in names}
    write_npz(file, kept | {name.replace("__", "."): array for name, array in arrays.items()})


def restated(at: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = at / "sparse/sparse_embeddings-00-of-02.json"
    stated = json.loads(file.read_text())
    change(stated)
    file.write_text(json.dumps(stated))


def compressed(at: Path) -> None:
    np.savez_compressed(at / "sparse/sparse_embeddings-00-of-02.npz", cities=np.zeros((6, 4), np.float32))


def of_fortran(at: Path) -> None:
    write_npz(at / "sparse/sparse_embeddings-00-of-02.npz", {"cities": np.zeros((4, 6), np.float32).T})


STATIC, DYNAMIC = "sparse_embeddings-0{}-of-02", r"sparse_dynamic_embedding-0{}-of-02\.npz"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda at: [file.unlink() for file in (at / "sparse").glob("*-01-of-02.npz")],
            r"sparse: expected files of ranks 0 to 1, found no sparse_embeddings-01-of-02\.npz",
        ),
        (
            lambda at: (at / "sparse/sparse_embeddings-01-of-02.npz").unlink(),
            r"sparse: expected files of ranks 0 to 1, found no sparse_embeddings-01-of-02\.npz",
        ),
        (
            lambda at: (at / "sparse/sparse_dynamic_embedding-01-of-02.npz").unlink(),
            DYNAMIC.format(1)
            + r": table 'films': expected rows \[\d+, 6\], as sparse_embeddings-01-of-02\.json says, found none",
        ),
        (
            lambda at: [
                file.unlink() for file in [*at.rglob("*.json"), at / "sparse/sparse_dynamic_embedding-01-of-02.npz"]
            ],
            r"sparse: expected files of ranks 0 to 1, found no sparse_dynamic_embedding-01-of-02\.npz",
        ),
        (
            lambda at: write_tzrec(at, TABLES, 3),
            r"sparse: expected files of one number of ranks, found those of \['02', '03'\]",
        ),
        (
            lambda at: rewritten(at, "films.keys"),
            DYNAMIC.format(0) + r": table 'films': expected keys and values, found no keys",
        ),
        (
            lambda at: rewritten(at, films__keys=np.zeros(3, np.int64)),
            DYNAMIC.format(0) + r": table 'films': expected keys int64 \[\d+\], one for each row, found int64 \[3\]",
        ),
        (
            lambda at: rewritten(at, films__keys=np.arange(18, dtype=np.int32)),
            DYNAMIC.format(0) + r": table 'films': expected keys int64 \[\d+\], one for each row, found int32 \[18\]",
        ),
        (
            lambda at: rewritten(at, films__keys=np.arange(5), films__values=np.zeros((5, 6), np.float32)),
            DYNAMIC.format(0)
            + r": table 'films': expected rows \[\d+, 6\], as sparse_embeddings-00-of-02\.json says, found \[5, 6\]",
        ),
        (
            lambda at: [
                rewritten(at, rank=rank, films__values=np.zeros((len(by_rank_keys(at, rank)), 6), np.int32))
                for rank in (0, 1)
            ],
            DYNAMIC.format(0)
            + r": table 'films': expected floats \[n, dim\], or uint8 codes, scale and offset, found int32 \[\d+, 6\]",
        ),
        (
            lambda at: rewritten(at, rank=1, films__values=np.zeros((len(by_rank_keys(at, 1)), 10), np.uint8)),
            DYNAMIC.format(1) + r": table 'films': expected float32 \[n, 6\] as in .*-00-of-02\.npz, found uint8 ",
        ),
        (
            lambda at: rewritten(at, rank=1, films__keys=duplicated(at)),
            DYNAMIC.format(0)
            + r": table 'films': expected each key once, found -?\d+ twice, also in .*"
            + DYNAMIC.format(1),
        ),
        (
            lambda at: rewritten(at, objects__keys=np.array([{}, 1], object)),
            DYNAMIC.format(0) + r": objects\.keys\.npy: expected an array of numbers, row by row, found object \[2\]",
        ),
        (compressed, STATIC.format(0) + r"\.npz: expected arrays that are not compressed, found cities\.npy"),
        (
            of_fortran,
            STATIC.format(0) + r"\.npz: cities\.npy: expected an array of numbers, row by row, found float32 \[6, 4\]",
        ),
        (
            lambda at: cut_off(at / "sparse/sparse_embeddings-00-of-02.npz", 30),
            STATIC.format(0) + r"\.npz: can't be read as an \.npz file",
        ),
        (
            lambda at: zipfile.ZipFile(at / "sparse/sparse_embeddings-00-of-02.npz", "w").writestr("a.txt", "x"),
            STATIC.format(0) + r"\.npz: can't be read as an \.npz file",
        ),
        (
            lambda at: restated(at, lambda stated: stated.pop("films")),
            STATIC.format(0) + r"\.json: table 'films': expected the shapes of all tables of its rank, found none",
        ),
        (
            lambda at: restated(at, lambda stated: stated["cities"].update(shape=[7, 4])),
            STATIC.format(0)
            + r"\.npz: table 'cities': expected rows \[7, 4\], as sparse_embeddings-00-of-02\.json says, found \[6",
        ),
        (
            lambda at: restated(at, lambda stated: stated.update(films=3)),
            STATIC.format(0) + r"\.json: can't be read as tables and their shapes",
        ),
        (
            lambda at: [file.unlink() for file in at.rglob("*.npz")],
            r"sparse: no file sparse_embeddings-RR-of-WW\.npz",
        ),
    ],
)
def test_files_of_tzrec_that_do_not_fit_are_refused(
    tmp_path: Path, change: Callable[[Path], object], message: str
) -> None:
    change(write_tzrec(tmp_path, TABLES | ROWS, 2))
    refuse("tzrec", tmp_path, message)


def by_rank_keys(at: Path, rank: int) -> np.ndarray:
    with np.load(at / f"sparse/sparse_dynamic_embedding-{rank:02d}-of-02.npz") as there:
        keys: np.ndarray = there["films.keys"]
        return keys


def duplicated(at: Path) -> np.ndarray:
    keys = by_rank_keys(at, 1)
    keys[0] = by_rank_keys(at, 0)[0]
    return keys


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda at: [(at / "a").mkdir(), *(np.save(at / name, np.ones(1)) for name in ("a/b.npy", "a.b.npy"))],
            "two files are one name with dots",
        ),
        (
            lambda at: np.save(at / "films.keys.npy", np.arange(39)),
            r"films\.keys\.npy: table 'films': expected \[40\] keys, as there are rows, found \[39\]",
        ),
        (
            lambda at: np.save(at / "films.keys.npy", np.arange(40) // 2),
            r"films\.keys\.npy: table 'films': expected each key once, found 0 twice",
        ),
        (
            lambda at: np.save(at / "films.keys.npy", np.arange(40.0)),
            r"films\.keys\.npy: table 'films': expected integers \[n\] of at most 64 bits, got float64 \[40\]",
        ),
        (
            lambda at: np.save(at / "films.npy", np.zeros((40, 6), np.int32)),
            r"films\.npy: table 'films': .*expected a dense array .* of float16, bfloat16, float32 or float64, "
            r"got int32 \[40, 6\]",
        ),
        (
            lambda at: np.save(at / "films.npy", np.full((40, 6), {}, object), allow_pickle=True),
            r"table 'films': .*films\.npy: not an array that can be read",
        ),
        (lambda at: cut_off(at / "films.npy", 4), r"table 'films': .*films\.npy: not an array that can be read"),
        (lambda at: [file.unlink() for file in at.glob("*.npy")], r": no \.npy files"),
    ],
)
def test_numpy_files_that_do_not_fit_are_refused(
    tmp_path: Path, change: Callable[[Path], object], message: str
) -> None:
    change(write_numpy(tmp_path, TABLES, {}))
    refuse("numpy", tmp_path, message)


@pytest.mark.parametrize("kind", ["dynamicemb", "tzrec", "torchrec", "hps", "tfra", "numpy"])
@pytest.mark.parametrize("name", ["file", "folder", "nothing"])
def test_a_path_that_holds_nothing_of_a_kind_is_refused(tmp_path: Path, kind: Kind, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"x")
    refuse(kind, tmp_path / name, f"{tmp_path / name}: ")


class RunsCode:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


def test_pickles_are_refused_and_not_run(tmp_path: Path) -> None:
    runs = np.array([RunsCode(tmp_path / "ran"), 1], object)
    (tmp_path / "numpy").mkdir()
    np.save(tmp_path / "numpy/films.npy", runs, allow_pickle=True)
    refuse("numpy", tmp_path / "numpy", r"films\.npy: not an array that can be read")
    (tmp_path / "tzrec").mkdir()
    write_npz(tmp_path / "tzrec/sparse_embeddings-00-of-01.npz", {"films": runs})
    refuse("tzrec", tmp_path / "tzrec", r"films\.npy: expected an array of numbers, row by row, found object \[2\]")
    torch.save({"w": torch.zeros(2), "extra": RunsCode(tmp_path / "ran")}, tmp_path / "model.pt")
    refuse("torchrec", tmp_path / "model.pt", r"model\.pt: holds objects other than tensors and plain data")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("kind", "value"), [("tfra", np.nan), ("tzrec", np.inf), ("numpy", np.nan)])
def test_a_value_that_is_no_number_is_refused_by_its_file_and_its_row_there(
    tmp_path: Path, kind: Kind, value: float
) -> None:
    saved = Saved(np.ones((10, 4), np.float32), np.arange(10))
    saved.rows[7, 2] = value  # Of the second rank, the fourth of 1, 3, 5, 7, 9.
    match kind:
        case "tfra":
            write_tfra(tmp_path, {"films": saved}, 2)
        case "tzrec":
            write_tzrec(tmp_path, {"films": saved}, 2)
        case _:
            write_numpy(tmp_path, {"films": saved}, {})
    checkpoint = open_import(kind, tmp_path)
    (name,) = checkpoint.names()
    keys = checkpoint.keys(name)
    assert keys is not None
    row = keys.tolist().index(7)
    spec = model_of([table_of("films", 12, 4, "film", keys="int64")])
    with pytest.raises(ExportError) as caught:
        export_snapshot(
            tmp_path / "store", spec, rows={"films": checkpoint.rows(name)}, keys={"films": keys}, dense={},
        )  # fmt: skip
    where = {
        "tfra": "films_mht_1of1_rank1_size2-values, row 3",
        "tzrec": "sparse_dynamic_embedding-01-of-02.npz, row 3",
        "numpy": "films.npy",
    }[kind]
    assert re.fullmatch(rf"table 'films', row {row} \(.*/{where}\): holds NaN or inf", str(caught.value))


@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply")
@pytest.mark.parametrize("scale", [np.nan, np.inf])
def test_a_quantised_row_that_is_no_number_is_refused_by_its_file_and_its_row_there(
    tmp_path: Path, scale: float
) -> None:
    stored = np.zeros((5, 8), np.uint8)
    stored[3, 4:6] = np.array([scale], np.float16).view(np.uint8)
    (tmp_path / "one").touch()
    joined = JoinedRows("films", [Part(tmp_path / "one", stored[:2]), Part(tmp_path / "one", stored[2:])])
    spec = model_of([table_of("films", 12, 4, "film", keys="int64")])
    message = r"table 'films', row 3 \(.*/one, row 1\): values from nan to nan overflow as int8"
    with pytest.raises(ExportError, match=message):
        export_snapshot(tmp_path / "store", spec, rows={"films": joined}, keys={"films": np.arange(5)}, dense={})


@pytest.mark.parametrize("row", [0, 1, 2, 4])
def test_the_place_of_a_row_is_its_file_and_its_number_there(row: int) -> None:
    parts = [Part(Path(name), np.zeros((count, 2), np.float32)) for name, count in (("a", 2), ("b", 0), ("c", 3))]
    assert JoinedRows("t", parts).location(row) == (f" (a, row {row})" if row < 2 else f" (c, row {row - 2})")
