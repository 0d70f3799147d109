"""The sparse inputs of one request, in the model's flat order, as keyed bags.

What happens once per feature here is what a format that names every tensor can't avoid; ids are only touched by vector
operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
import numpy.typing as npt

from loader.fingerprint import fingerprint_strings
from serving.errors import CountMismatchError, InvalidFieldError, InvalidIdError, LimitExceededError
from serving.limits import MAX_ID
from serving.oip.infer_request import InputTensor, Integers, IntegerType, input_path
from serving.oip.input_names import LENGTHS_SUFFIX, WEIGHTS_SUFFIX
from serving.parse_checks import check_num_candidates
from serving.parse_schema import RequestSchema
from shard_node.bags import Float32Array, Int64Array, KeyedBags

_INTEGER_TYPES = ("INT64", "INT32")


class InputColumns:
    """The features of one request.

    Args:
        schema: of the model version.
        given: inputs by name; every feature is there.
        num_required: how many inputs every request has.

    Raises:
        BadRequestError: one of its subclasses, for a shape, a datatype or data that don't fit.

    Attributes:
        texts: string ids of all features, in flat order.
    """

    def __init__(self, schema: RequestSchema, given: Mapping[str, InputTensor], num_required: int) -> None:
        self._schema = schema
        self._given = given
        self._max_ids = schema.limits.max_ids_per_request
        self._ids: list[Integers] = []
        self._num_bags: list[int] = []
        self._widths: list[int] = []
        self._ragged: dict[int, Integers] = {}
        self.texts: list[str] = []
        # Most requests bring nothing that is optional; then it is not looked for either.
        self._has_optional = len(given) > num_required
        kinds = zip(schema.names, schema.features.is_context.tolist(), schema.is_string.tolist(), strict=True)
        for key, (name, is_context, is_string) in enumerate(kinds):
            self._read(key, name, is_context=is_context, is_string=is_string)

    def num_bags(self, key: int) -> int:
        """Bags of one feature."""
        return self._num_bags[key]

    def bags(self, num_candidates: int) -> KeyedBags:
        """Flat bags.

        Args:
            num_candidates: how many bags each candidate feature must have; within its limit.

        Raises:
            CountMismatchError: for a feature with another number of bags, lengths that don't add up to its ids, or
                weights of another shape than its ids.
            InvalidFieldError: for a length that is negative, or weights that are not FP32.
        """
        schema = self._schema
        counts, expected = np.array(self._num_bags, dtype=np.int64), schema.bags_per_key(num_candidates)
        if (counts != expected).any():
            key = int((counts != expected).argmax())
            first = schema.candidate_names[0]
            raise CountMismatchError(
                input_path(schema.names[key]),
                f"{int(counts[key])} candidates, but {input_path(first)} has {num_candidates}",
            )
        lengths = np.repeat(np.array(self._widths, dtype=np.int64), counts)
        if self._ragged:
            lengths[self._of_keys(self._ragged, counts)] = self._ragged_lengths()
        values = np.concatenate(self._ids, dtype=np.int64) if self._ids else np.empty(0, np.int64)
        bags = KeyedBags.from_lengths(schema.keys, counts, lengths, values)
        if self._ragged:
            self._check_sums(bags)
        weights = self._weights(bags)
        return bags if weights is None else KeyedBags(bags.keys, counts, bags.offsets, values, weights)

    def _read(self, key: int, name: str, *, is_context: bool, is_string: bool) -> None:
        tensor = self._given[name]
        count, shape = element_count(tensor), tensor.shape
        if count > self._max_ids:
            raise LimitExceededError(input_path(name), "max_ids_per_request", self._max_ids, count, "ids")
        num_bags, width = shape if len(shape) == 2 else (shape[0], 1)
        if is_context:
            if len(shape) == 2 and num_bags != 1:
                raise _wrong_shape(tensor, "a context feature has [ids] or [1, ids]")
            num_bags, width = 1, count
        elif self._has_optional and (lengths := self._given.get(name + LENGTHS_SUFFIX)) is not None:
            if len(shape) != 1:
                raise _wrong_shape(tensor, f"with {name}{LENGTHS_SUFFIX} it must be [ids]")
            num_bags, width = element_count(lengths), 0
            check_num_candidates(self._schema.limits, num_bags)
            self._ragged[key] = _integers(lengths, num_bags)
        self._num_bags.append(num_bags)
        self._widths.append(width)
        if not is_string:
            self._ids.append(_integers(tensor, count))
            return
        if tensor.datatype != "BYTES":
            path = f"{input_path(name)}.datatype"
            raise InvalidIdError(path, f"{tensor.datatype[:16]!r}; ids of {name!r} are strings: BYTES")
        texts = tensor.data.texts(name, count)
        self._ids.append(fingerprint_strings(texts))
        self.texts += texts

    def _ragged_lengths(self) -> Int64Array:
        lengths = np.concatenate(list(self._ragged.values()), dtype=np.int64)
        # Also keeps sums of lengths from running over.
        if lengths.size and not 0 <= int(lengths.min()) <= int(lengths.max()) <= self._num_ids():
            for key, own in self._ragged.items():
                if own.size and not 0 <= int(own.min()) <= int(own.max()) <= len(self._ids[key]):
                    position = int(((own < 0) | (own > len(self._ids[key]))).argmax())
                    raise InvalidFieldError(
                        f"{input_path(self._schema.names[key])}{LENGTHS_SUFFIX}[{position}]",
                        f"{int(own[position])} is not in 0..{len(self._ids[key])}, the number of ids",
                    )
        return lengths

    def _num_ids(self) -> int:
        return sum(map(len, self._ids))

    def _check_sums(self, bags: KeyedBags) -> None:
        described = bags.values_per_key()
        given = np.fromiter(map(len, self._ids), np.int64, count=len(self._ids))
        if (described != given).any():
            key = int((described != given).argmax())
            raise CountMismatchError(
                f"{input_path(self._schema.names[key])}{LENGTHS_SUFFIX}",
                f"they add up to {int(described[key])}, but there are {int(given[key])} ids",
            )

    def _weights(self, bags: KeyedBags) -> Float32Array | None:
        given: dict[int, Float32Array] = {}
        if not self._has_optional:
            return None
        for name in self._schema.weighted_names:
            tensor = self._given.get(name + WEIGHTS_SUFFIX)
            if tensor is None:
                continue
            if list(tensor.shape) != list(self._given[name].shape):
                raise _wrong_shape(tensor, f"it must be that of its ids, {list(self._given[name].shape)}")
            given[self._schema.features.index[name]] = floats_of(tensor, element_count(tensor))
        if not given:
            return None
        ordered = dict(sorted(given.items()))
        weights = np.ones(bags.num_values, dtype=np.float32)
        weights[self._of_keys(ordered, bags.values_per_key())] = np.concatenate(list(ordered.values()))
        return weights

    def _of_keys(self, keys: Mapping[int, object], counts: Int64Array) -> npt.NDArray[np.bool_]:
        """Bool [sum of counts], True for what belongs to one of the keys."""
        chosen = np.zeros(counts.size, dtype=np.bool_)
        chosen[list(keys)] = True
        return np.repeat(chosen, counts)


def element_count(tensor: InputTensor) -> int:
    """Elements of a tensor of one or two dimensions.

    Raises:
        CountMismatchError: for another number of dimensions, or one that can't be.
    """
    shape = tensor.shape
    if len(shape) == 1 and 0 <= shape[0] <= MAX_ID:
        return shape[0]
    if len(shape) == 2 and 0 <= shape[0] <= MAX_ID and 0 <= shape[1] <= MAX_ID:
        return shape[0] * shape[1]
    raise _wrong_shape(tensor, "it must have one or two dimensions, each 0 or more")


def floats_of(tensor: InputTensor, count: int) -> Float32Array:
    """float32 [count]. Raises InvalidFieldError for another datatype, CountMismatchError."""
    if tensor.datatype != "FP32":
        raise InvalidFieldError(f"{input_path(tensor.name)}.datatype", f"{tensor.datatype[:16]!r}; it must be FP32")
    return tensor.data.floats(tensor.name, count)


def _integers(tensor: InputTensor, count: int) -> Integers:
    datatype = tensor.datatype
    if datatype not in _INTEGER_TYPES:
        path = f"{input_path(tensor.name)}.datatype"
        raise InvalidIdError(path, f"{datatype[:16]!r}; it must be INT64 or INT32")
    return tensor.data.integers(tensor.name, cast(IntegerType, datatype), count)


def _wrong_shape(tensor: InputTensor, allowed: str) -> CountMismatchError:
    return CountMismatchError(f"{input_path(tensor.name)}.shape", f"{list(tensor.shape)[:8]}; {allowed}")
