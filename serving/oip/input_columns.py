"""The elements of a request's inputs, by their layout: keyed bags in the model's flat order, and dense values.

Elements are only touched by vector operations, a fixed number of them where they lie in the order of the features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from loader.fingerprint import fingerprint_strings
from serving.errors import CountMismatchError, InvalidFieldError
from serving.oip.infer_request import Buffer, InferInputs, InputTensor, Integers, IntegerType, input_path
from serving.oip.input_layout import InputLayout, RaggedBags, Run
from serving.oip.input_names import LENGTHS_SUFFIX
from serving.oip.raw_data import RawData, elements_at
from serving.parse_checks import check_bag_lengths, check_values
from serving.parse_schema import RequestSchema
from shard_node.bags import Float32Array, Int64Array, KeyedBags


class Elements(Protocol):
    """Where the elements of one request are. Each method raises as those of `TensorData`."""

    def integers(self, run: Run) -> Integers:
        """Int64 or int32 [count], maybe a view of the request."""
        ...

    def own_integers(self, run: Run) -> Int64Array:
        """int64 [count], aligned, in memory that may be written to and is used by nobody else."""
        ...

    def floats(self, run: Run) -> Float32Array:
        """float32 [count], maybe a view of the request."""
        ...

    def texts(self, run: Run) -> list[str]:
        """Strings."""
        ...


class BinaryElements:
    """All inputs behind each other in one buffer.

    Args:
        inputs: of the request; the layout's sizes fill its buffer.
    """

    def __init__(self, inputs: InferInputs) -> None:
        self._buffer: Buffer = inputs.binary
        self._is_own = inputs.is_own

    def integers(self, run: Run) -> npt.NDArray[Any]:
        """As `Elements`."""
        return elements_at(self._buffer, run.datatype, run.count, run.start)

    def own_integers(self, run: Run) -> Int64Array:
        """As `Elements`."""
        values = elements_at(self._buffer, run.datatype, run.count, run.start)
        if self._is_own and run.datatype == "INT64" and values.flags.aligned:
            return values
        return values.astype(np.int64)

    def floats(self, run: Run) -> Float32Array:
        """As `Elements`."""
        return elements_at(self._buffer, run.datatype, run.count, run.start)

    def texts(self, run: Run) -> list[str]:
        """As `Elements`."""
        element = memoryview(self._buffer)[run.start : run.start + run.size_bytes]
        return RawData(element).texts(run.name, run.count)


class GivenElements:
    """Each input has its own.

    Args:
        given: inputs by name; all that the layout has.
    """

    def __init__(self, given: Mapping[str, InputTensor]) -> None:
        self._given = given

    def integers(self, run: Run) -> Integers:
        """As `Elements`."""
        return self._given[run.name].data.integers(run.name, cast(IntegerType, run.datatype), run.count)

    def own_integers(self, run: Run) -> Int64Array:
        """As `Elements`."""
        return self.integers(run).astype(np.int64)

    def floats(self, run: Run) -> Float32Array:
        """As `Elements`."""
        return self._given[run.name].data.floats(run.name, run.count)

    def texts(self, run: Run) -> list[str]:
        """As `Elements`."""
        return self._given[run.name].data.texts(run.name, run.count)


def bags_of(schema: RequestSchema, layout: InputLayout, elements: Elements) -> tuple[KeyedBags, Sequence[str]]:
    """Flat bags, checked, and the strings among their ids.

    Raises:
        InvalidIdError: for an id that is negative, or text that is not UTF-8.
        InvalidFieldError: for a length or a weight that can't be.
        CountMismatchError: for lengths that don't add up to their ids.
        LimitExceededError: for a bag that is too long.
        BadRequestError: one of its subclasses, for elements that are not what the layout says.
    """
    values, texts = _values(layout, elements)
    offsets = layout.offsets
    if offsets is not None:
        bags = KeyedBags(schema.keys, layout.bags_per_key, offsets, values)
    else:
        bags = _ragged_bags(schema, layout, elements, values)
    if layout.weights:
        weights = _weights(layout, elements)
        bags = KeyedBags(bags.keys, bags.bags_per_key, bags.offsets, values, weights)
    check_values(schema, bags)
    return bags, texts


def dense_of(run: Run | None, elements: Elements, shape: tuple[int, ...]) -> Float32Array:
    """float32 of a shape: a copy, because the request's own bytes may be read-only."""
    if run is None:
        return np.empty(shape, np.float32)
    return np.array(elements.floats(run), dtype=np.float32).reshape(shape)


def _values(layout: InputLayout, elements: Elements) -> tuple[Int64Array, Sequence[str]]:
    runs = layout.ids
    if len(runs) == 1 and runs[0].datatype != "BYTES":
        return elements.own_integers(runs[0]), ()
    texts: list[str] = []
    parts: list[Integers] = []
    for run in runs:
        if run.datatype != "BYTES":
            parts.append(elements.integers(run))
            continue
        own = elements.texts(run)
        parts.append(fingerprint_strings(own))
        texts += own
    return np.concatenate(parts, dtype=np.int64) if parts else np.empty(0, np.int64), texts


def _ragged_bags(schema: RequestSchema, layout: InputLayout, elements: Elements, values: Int64Array) -> KeyedBags:
    ragged = layout.ragged
    if ragged is None:
        raise TypeError("a layout without offsets has features with lengths of their own")
    own = np.concatenate([elements.integers(run) for run in ragged.runs], dtype=np.int64)
    # Also keeps sums of lengths from running over.
    if own.size and not 0 <= int(own.min()) <= int(own.max()) <= values.size:
        _refuse_lengths(layout, ragged, own)
    lengths = ragged.lengths.copy()
    lengths[ragged.is_own] = own
    bags = KeyedBags.from_lengths(schema.keys, layout.bags_per_key, lengths, values)
    described, given = bags.values_per_key(), np.array(layout.num_ids, np.int64)
    if (described != given).any():
        key = int((described != given).argmax())
        raise CountMismatchError(
            f"{input_path(schema.names[key])}{LENGTHS_SUFFIX}",
            f"they add up to {int(described[key])}, but there are {int(given[key])} ids",
        )
    check_bag_lengths(schema, bags)
    return bags


def _refuse_lengths(layout: InputLayout, ragged: RaggedBags, lengths: Int64Array) -> None:
    start = 0
    for run, key in zip(ragged.runs, ragged.keys, strict=True):
        own, most = lengths[start : start + run.count], layout.num_ids[key]
        start += run.count
        wrong = (own < 0) | (own > most)
        if wrong.any():
            position = int(wrong.argmax())
            path = f"{input_path(run.name)}[{position}]"
            raise InvalidFieldError(path, f"{int(own[position])} is not in 0..{most}, the number of ids")


def _weights(layout: InputLayout, elements: Elements) -> Float32Array:
    """float32 [n], 1 where a feature has none."""
    is_own = np.zeros(len(layout.num_ids), np.bool_)
    is_own[[key for key, _ in layout.weights]] = True
    weights = np.ones(sum(layout.num_ids), dtype=np.float32)
    weights[np.repeat(is_own, layout.num_ids)] = np.concatenate([elements.floats(run) for _, run in layout.weights])
    return weights
