"""The binary path: what a message says of where its numbers lie, to keyed bags.

Every form reads its layout first, which is a count for each feature. When all counts are within the limits, the form
hands over the buffers: little-endian numbers where they lie in the message, joined to arrays of the whole request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from loader.snapshot.manifest import fingerprint_strings
from serving.errors import (
    CountMismatchError,
    InvalidFieldError,
    InvalidIdError,
    LimitExceededError,
    MalformedRequestError,
)
from serving.formats.checks import keyed_bags
from serving.formats.requests import Buffer
from serving.formats.schema import MAX_NAME_CHARS, RequestSchema
from serving.limits import MAX_ID
from shard_node.bags import Int32Array, Int64Array, KeyedBags

INTEGERS = ("INT64", "INT32")
DTYPES = {"INT64": "<i8", "INT32": "<i4", "FP32": "<f4"}
_WIDTHS = {"INT64": 8, "INT32": 4, "FP32": 4}
RAGGED = -1
"""The width of a feature that says how many ids each of its bags has."""


class FeatureCounts:
    """How many ids and bags each feature of a request has, in flat order. `path` names a feature in errors.

    Attributes:
        keys: int32 [S], flat indices of the features that the request has; a lookup may have any.
        num_ids, num_bags: of each feature.
        widths: ids in each bag of a feature; `RAGGED` if it brings lengths of its own.
        weighted: positions in `keys` of those that bring weights.
    """

    def __init__(
        self, schema: RequestSchema, keys: Int32Array, path: Callable[[str], str], *, lookup: bool = False
    ) -> None:
        self.keys = keys
        self.num_ids: list[int] = []
        self.num_bags: list[int] = []
        self.widths: list[int] = []
        self.weighted: list[int] = []
        self._schema, self._path, self._lookup = schema, path, lookup

    def add(self, num_ids: int, num_bags: int, width: int) -> None:
        """Add the next feature."""
        self.num_ids.append(num_ids)
        self.num_bags.append(num_bags)
        self.widths.append(width)

    def check(self, num_candidates: int) -> None:
        """Refuse a rank request with too many ids, or a feature with other than one bag, or one for each candidate."""
        self.check_num_ids()
        given, expected = self.num_bags, self._schema.bags_per_key(num_candidates).tolist()
        if given != expected:
            key = next(key for key, count in enumerate(expected) if given[key] != count)
            name, is_context, _ = self._schema.kinds[key]
            unit = "bags" if is_context else "candidates"
            raise CountMismatchError(self._path(name), f"{given[key]} {unit}, expected {expected[key]}")

    def check_num_ids(self) -> None:
        """Raises LimitExceededError for too many ids, before any is read."""
        total, allowed = sum(self.num_ids), self._schema.limits.max_ids_per_request
        if total > allowed:
            for key, count in zip(self.keys.tolist(), self.num_ids, strict=True):
                if count > allowed:
                    path = self._path(self._schema.names[key])
                    raise LimitExceededError(path, "max_ids_per_request", allowed, count, "ids")
            raise LimitExceededError("sparse", "max_ids_per_request", allowed, total, "ids over all features")

    def bags(
        self, ids: Iterable[Buffer], texts: Sequence[str], lengths: Int64Array, weights: Sequence[Buffer]
    ) -> KeyedBags:
        """Make the bags of what was counted.

        Args:
            ids: int64, of the features whose ids are integers, one after the other.
            texts: the other features' ids.
            lengths: int64, ids in each bag of the features that are `RAGGED`.
            weights: float32, of the features that are `weighted`.
        """
        num_ids, num_bags = np.array(self.num_ids, np.int64), np.array(self.num_bags, np.int64)
        flat_lengths: Int64Array | None = lengths
        if self.widths.count(RAGGED) < len(self.widths):
            widths = np.repeat(np.array(self.widths, np.int64), num_bags)
            if lengths.size:
                widths[widths == RAGGED] = lengths
            flat_lengths = None if self.widths.count(1) == len(self.widths) else widths
        flat_weights = None
        if weights:
            flat_weights = np.ones(sum(self.num_ids), np.float32)
            is_weighted = np.zeros(num_ids.size, np.bool_)
            is_weighted[self.weighted] = True
            flat_weights[np.repeat(is_weighted, num_ids)] = array_of(joined(weights), "<f4", "weights")
        values = values_of(self._schema, self.keys, num_ids, array_of(joined(ids), "<i8", "ids"), texts)
        return keyed_bags(
            self._schema, self.keys, num_bags, flat_lengths, num_ids, values, flat_weights, lookup=self._lookup
        )


def values_of(
    schema: RequestSchema, keys: Int32Array, num_ids: Int64Array, integers: Int64Array, texts: Sequence[str]
) -> Int64Array:
    """All ids in flat order, int64 [n]: integers, and between them fingerprints of the strings."""
    if not texts:
        return integers
    is_text = np.repeat(schema.is_string[keys], num_ids)
    values = np.empty(is_text.size, np.int64)
    values[is_text] = fingerprint_strings(texts)
    values[~is_text] = integers
    return values


def joined(buffers: Iterable[Buffer]) -> bytearray:
    """Copy buffers behind one another: aligned, writable, and nothing of the message is kept."""
    return bytearray().join(buffers)


def array_of(buffer: Buffer, dtype: str, path: str) -> npt.NDArray[Any]:
    """View a buffer as numbers such as `<f4`. Raises MalformedRequestError for a part of one."""
    width, size = int(dtype[-1]), len(buffer)
    if size % width:
        raise MalformedRequestError(path, f"{size} bytes, which is not a multiple of {width}")
    return np.frombuffer(buffer, dtype)


class Elements(Protocol):
    """The elements of a tensor that does not have them as they lie in memory."""

    def elements(self, path: str, datatype: str, count: int) -> Any:
        """Decode as many as `count`: a buffer of numbers, or a list of strings. `path` names the input."""
        ...


class Tensor(msgspec.Struct, gc=False):
    """A named array, as the client describes it: `shape` is not checked.

    Raw data are little-endian and row-major, a string is a 4-byte length and its bytes.
    """

    name: str
    datatype: str
    shape: list[int]
    data: memoryview | Elements

    def sizes(self) -> tuple[int, int]:
        """Rows of one or two dimensions, and elements of each row."""
        shape = self.shape
        if len(shape) == 1 and 0 <= shape[0] <= MAX_ID:
            return shape[0], 1
        if len(shape) == 2 and 0 <= shape[0] <= MAX_ID and 0 <= shape[1] <= MAX_ID:
            return shape[0], shape[1]
        raise self.wrong_shape("it must have one or two dimensions, each 0 or more")

    def integers(self, count: int) -> Buffer:
        """int64 elements, as many as `count`."""
        found: Buffer = self._elements(count, INTEGERS)
        return found if self.datatype == "INT64" else np.frombuffer(found, "<i4").astype("<i8").data

    def floats(self, count: int) -> Buffer:
        """float32 elements, as many as `count`; NaN and inf are not looked for."""
        found: Buffer = self._elements(count, ("FP32",))
        return found

    def texts(self, count: int) -> list[str]:
        """Strings, as many as `count`. Where one begins only the one before it tells."""
        data = self._elements(count, ("BYTES",))
        if isinstance(data, list):
            return data
        start, path, texts = 0, input_path(self.name), list[str]()
        while start < len(data) and len(texts) <= count:
            first = start + 4
            start = first + int.from_bytes(data[start:first], "little")
            if start > len(data):
                raise MalformedRequestError(path, f"BYTES element {len(texts)} is longer than what is left")
            texts.append(text_of(path, len(texts), data[first:start]))
        if len(texts) != count:
            raise wrong_count(path, count, f"{len(texts)}" if len(texts) < count else f"at least {len(texts)}")
        return texts

    def wrong_shape(self, allowed: str) -> CountMismatchError:
        """Make the error for a shape."""
        return CountMismatchError(f"{input_path(self.name)}.shape", f"{self.shape[:8]}; {allowed}")

    def _elements(self, count: int, allowed: tuple[str, ...]) -> Any:
        datatype, data = self.datatype, self.data
        if datatype not in allowed:
            error = InvalidFieldError if allowed == ("FP32",) else InvalidIdError
            raise error(f"{input_path(self.name)}.datatype", f"{datatype[:16]!r}; it must be {' or '.join(allowed)}")
        if not isinstance(data, memoryview):
            return data.elements(input_path(self.name), datatype, count)
        if datatype != "BYTES" and len(data) != count * _WIDTHS[datatype]:
            wanted = f"{count} elements of {datatype}, {count * _WIDTHS[datatype]} bytes"
            raise CountMismatchError(input_path(self.name), f"{len(data)} bytes of data; its shape holds {wanted}")
        return data


def input_path(name: str) -> str:
    """Name an input in errors."""
    return f"inputs.{name[:MAX_NAME_CHARS]}"


def text_of(path: str, position: int, element: Buffer) -> str:
    """Decode a string. Raises InvalidIdError if it is not UTF-8."""
    try:
        return str(element, "utf-8")
    except UnicodeDecodeError as error:
        raise InvalidIdError(f"{path}[{position}]", f"it is not UTF-8: {error.reason}") from None


def wrong_count(path: str, count: int, got: str) -> CountMismatchError:
    """Make the error for another number of elements than a shape holds."""
    return CountMismatchError(path, f"its shape holds {count} elements, its data {got}")
