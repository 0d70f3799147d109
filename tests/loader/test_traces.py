"""Traces in every form count the same ids, and what is no trace is refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader import traces
from loader.access_counts import AccessCounts
from loader.errors import TraceError
from loader.snapshot.tables import fingerprint_strings
from loader.traces import count_values, read_traces

IDS = np.array([7, 3, 7, 2**62, 3, 7])
COUNTED = {3: 2, 7: 3, 2**62: 1}


def counted(one: AccessCounts) -> dict[int, int]:
    assert np.all(np.diff(one.keys) > 0)
    return dict(zip(one.keys.tolist(), one.counts.tolist(), strict=True))


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 7))
def test_ids_are_counted_in_whatever_pieces_they_come(ids: list[int], piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traces, "_PIECE_VALUES", piece)
        found = count_values("here", np.array(ids, np.int32))
    assert counted(found) == {one: ids.count(one) for one in ids}
    assert found.total == len(ids)


def test_npy_and_csv_count_alike_and_several_traces_add_up(tmp_path: Path) -> None:
    np.save(tmp_path / "item.npy", IDS)
    lines = ["label,item,shop", *(f"0,{one},a{one % 2}" for one in IDS), "1,,"]
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    csv, npy = str(tmp_path / "log.csv"), f"item={tmp_path / 'item.npy'}"
    of_csv = read_traces([csv], {"item", "shop", "user"})
    assert counted(of_csv["item"]) == counted(read_traces([npy], {"item"})["item"]) == COUNTED
    # Texts count by the fingerprint that serving looks them up by; an empty cell is no id.
    a0, a1 = fingerprint_strings(["a0", "a1"]).tolist()
    assert of_csv.keys() == {"item", "shop"}
    assert counted(of_csv["shop"]) == {a0: 1, a1: 5}
    assert counted(read_traces([csv, npy], {"item"})["item"]) == {one: 2 * times for one, times in COUNTED.items()}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.array([1, -4]), "feature 'item': id -4 is not in"),
        (np.array([2**63], np.uint64), "id 9223372036854775808 is not in"),
        (np.array([1.5]), r"ids must be whole numbers \[n\]; got float64 \[1\]"),
        (np.zeros((2, 2), np.int64), r"got int64 \[2, 2\]"),
        (np.array(["a"], object), "not an array that can be read"),
    ],
)
def test_an_array_that_is_no_trace_is_refused(tmp_path: Path, values: np.ndarray, message: str) -> None:
    np.save(tmp_path / "item.npy", values)
    with pytest.raises(TraceError, match=message):
        read_traces([f"item={tmp_path / 'item.npy'}"], {"item"})


@pytest.mark.parametrize("header", ["{'descr': (", "{[]: 1}", "(" * 4000, "{'descr': '<i8', 'shape': (1,)}"])
def test_an_array_whose_header_is_none_is_refused(tmp_path: Path, header: str) -> None:
    path = tmp_path / "item.npy"
    path.write_bytes(b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header.encode())
    with pytest.raises(TraceError, match="not an array that can be read"):
        read_traces([f"item={path}"], {"item"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("user,shop\n1,2\n", r"none of its columns \['user', 'shop'\] is a feature; these are \['item'\]"),
        ("item,item\n1,2\n", "a column is there twice"),
        ("item,shop\n1\n", "a line of 1 cells; the header has 2"),
        ("item\n-1\n", "column 'item': id -1 is not in"),
        ("item\n99999999999999999999\n", "id 99999999999999999999 is not in"),
        (f"item\n{'a' * 1025}\n", "an id of 1025 characters; at most 1024"),
        ("item\n\xff\n", "can't be read"),
        ("item\n1.0\n2.0\n", "column 'item', line 2: '1.0' is neither a whole number nor a string"),
        ("item,shop\n7,1\nNaN,1\n", "'NaN' is neither a whole number nor a string"),
        ("item,shop\n7,1\n-,1\n", "'-' is neither a whole number nor a string"),
    ],
)
def test_a_table_that_is_no_trace_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "log.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(TraceError, match=message):
        read_traces([str(tmp_path / "log.csv")], {"item"})


def test_a_text_among_row_numbers_is_refused_and_unknown_columns_are_warned_of(tmp_path: Path, caplog) -> None:
    (tmp_path / "log.csv").write_text("itme,sku,item\n1,1,1\n2,7,2\n3,A-7,abc\n")
    assert read_traces([str(tmp_path / "log.csv")], {"item", "sku", "items"}).keys() == {"item", "sku"}
    assert (
        "log.csv: columns that match no feature are left out: ['itme']; features without a column are ['items']"
        in caplog.text
    )
    with pytest.raises(TraceError, match="column 'item', line 4: 'abc' is a text in a column of whole numbers"):
        read_traces([str(tmp_path / "log.csv")], {"item", "sku"}, {"item"})


def test_more_ids_than_there_is_room_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MAX_DISTINCT_IDS", 4)
    count_values("here", np.arange(4))
    with pytest.raises(TraceError, match="here: more than 4 different ids"):
        count_values("here", np.arange(5))
