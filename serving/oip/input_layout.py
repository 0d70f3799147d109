"""What the names, datatypes, shapes and sizes of a request's inputs say, whatever their elements are.

Requests of one client often differ in nothing but their elements, so an `InputLayout` is made once for all of them.
What happens once per feature here is what a format that names every tensor can't avoid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from serving.errors import CountMismatchError, InvalidFieldError, InvalidIdError, LimitExceededError
from serving.limits import MAX_ID
from serving.oip.infer_request import InputTensor, input_path
from serving.oip.input_names import CANDIDATE_DENSE, CONTEXT_DENSE, LENGTHS_SUFFIX, WEIGHTS_SUFFIX
from serving.oip.raw_data import RawData, element_bytes
from serving.parse_checks import check_bag_lengths, check_num_candidates, check_num_ids
from serving.parse_schema import RequestSchema
from shard_node.bags import Int64Array, KeyedBags

_INTEGER_TYPES = ("INT64", "INT32")
_NOWHERE = -1
_NO_SPAN = (_NOWHERE, 0)
# Of the objects of a layout, of a number that it holds, and of a run, about, as measured.
_LAYOUT_BYTES, _NUMBER_BYTES, _RUN_BYTES = 1536, 40, 256


@dataclass(slots=True)
class Run:
    """Elements that are read at once: of one input, or of neighbours that have the same datatype.

    Attributes:
        name: of the first input.
        datatype: of the elements.
        count: how many.
        start: where they begin among the request's binary elements, in bytes; -1 if they do not lie there.
        size_bytes: of them, there.
    """

    name: str
    datatype: str
    count: int
    start: int = _NOWHERE
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RaggedBags:
    """Features whose bags have lengths of their own.

    Attributes:
        runs: for each of them, in flat order, its lengths.
        keys: for each, its flat index.
        lengths: int64 [B], right for all others. Not to be changed.
        is_own: bool [B], where the lengths of those features belong.
    """

    runs: tuple[Run, ...]
    keys: tuple[int, ...]
    lengths: Int64Array
    is_own: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class InputLayout:
    """The inputs of requests of one form. Its arrays are shared by them, and not to be changed.

    Attributes:
        num_candidates: N, within its limit.
        num_ids: of each feature, in flat order.
        bags_per_key: int64 [F].
        offsets: int64 [B + 1], or None where lengths are elements.
        ids: the ids of all features, in flat order; only the ids of one feature are BYTES together.
        ragged: features with lengths of their own, or None.
        weights: flat index and elements of each feature that brings weights, in flat order.
        context_dense: float32 [Kc], or None.
        candidate_dense: float32 [N, Kd], or None.
        binary_bytes: of all inputs; 0 if they are not binary.
        size_bytes: of what this takes.
    """

    num_candidates: int
    num_ids: tuple[int, ...]
    bags_per_key: Int64Array
    offsets: Int64Array | None
    ids: tuple[Run, ...]
    ragged: RaggedBags | None
    weights: tuple[tuple[int, Run], ...]
    context_dense: Run | None
    candidate_dense: Run | None
    binary_bytes: int
    size_bytes: int


class LayoutMaker:
    """Makes the layout of one request's inputs.

    Args:
        schema: of the model version.
        given: inputs by name, in the client's order; every one that is needed is there, and no other.
        num_required: how many inputs every request has.
        is_binary: whether all elements are raw bytes, one input behind the other.
    """

    def __init__(
        self, schema: RequestSchema, given: Mapping[str, InputTensor], num_required: int, *, is_binary: bool
    ) -> None:
        self._schema = schema
        self._given = given
        self._max_ids = schema.limits.max_ids_per_request
        # Most requests bring nothing that is optional; then it is not looked for either.
        self._has_optional = len(given) > num_required
        # Where each input's elements begin, and how many bytes they are.
        self._spans: dict[str, tuple[int, int]] = {}
        self._binary_bytes = 0
        if is_binary:
            for name, tensor in given.items():
                size = _raw(tensor).size_bytes
                self._spans[name] = self._binary_bytes, size
                self._binary_bytes += size
        self._ids: list[Run] = []
        self._num_ids: list[int] = []
        self._num_bags: list[int] = []
        self._widths: list[int] = []
        self._ragged: dict[int, Run] = {}

    def make(self, form_bytes: int = 0) -> InputLayout:
        """The layout.

        Args:
            form_bytes: what it will be found by, for its size.

        Raises:
            CountMismatchError: for a shape that does not fit, or a feature with another number of candidates.
            InvalidIdError: for ids of another datatype.
            InvalidFieldError: for other inputs of another datatype.
            LimitExceededError: for too many candidates or ids.
        """
        schema = self._schema
        for key, (name, is_context, is_string) in enumerate(schema.kinds):
            self._read(key, name, is_context=is_context, is_string=is_string)
        dense = self._given.get(CANDIDATE_DENSE)
        num_candidates = self._num_candidates(dense)
        check_num_candidates(schema.limits, num_candidates)
        counts = self._counts(num_candidates)
        check_num_ids(schema, sum(self._num_ids))
        lengths = np.repeat(np.array(self._widths, dtype=np.int64), counts)
        ragged, offsets = self._ragged_bags(counts, lengths), None
        if ragged is None:
            bags = KeyedBags.from_lengths(schema.keys, counts, lengths, np.empty(0, np.int64))
            check_bag_lengths(schema, bags)
            offsets = bags.offsets
        weights = tuple(self._weights())
        num_runs = len(self._ids) + len(self._ragged) + len(weights)
        objects = _LAYOUT_BYTES + _NUMBER_BYTES * counts.size + _RUN_BYTES * num_runs
        # Where lengths are elements, there are two arrays of their size at most.
        arrays = counts.nbytes + (2 * lengths.nbytes if offsets is None else offsets.nbytes)
        return InputLayout(
            num_candidates=num_candidates,
            num_ids=tuple(self._num_ids),
            bags_per_key=counts,
            offsets=offsets,
            ids=tuple(self._ids),
            ragged=ragged,
            weights=weights,
            context_dense=self._dense(CONTEXT_DENSE, (schema.num_context_dense,), (1, schema.num_context_dense)),
            candidate_dense=self._dense(CANDIDATE_DENSE, (num_candidates, schema.num_candidate_dense)),
            binary_bytes=self._binary_bytes,
            size_bytes=form_bytes + objects + arrays,
        )

    def _read(self, key: int, name: str, *, is_context: bool, is_string: bool) -> None:
        tensor = self._given[name]
        count, shape, datatype = element_count(tensor), tensor.shape, tensor.datatype
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
            _check_integers(lengths)
            self._ragged[key] = self._run(lengths, num_bags)
        self._num_bags.append(num_bags)
        self._widths.append(width)
        self._num_ids.append(count)
        if is_string:
            if datatype != "BYTES":
                path = f"{input_path(name)}.datatype"
                raise InvalidIdError(path, f"{datatype[:16]!r}; ids of {name!r} are strings: BYTES")
        elif datatype not in _INTEGER_TYPES:
            _check_integers(tensor)
        self._add_ids(tensor, count)

    def _add_ids(self, tensor: InputTensor, count: int) -> None:
        start, size = self._span(tensor, count)
        last, datatype = self._ids[-1] if self._ids else None, tensor.datatype
        if (
            last is None
            or start == _NOWHERE
            or start != last.start + last.size_bytes
            or datatype != last.datatype
            or datatype == "BYTES"
        ):
            self._ids.append(Run(tensor.name, datatype, count, start, size))
            return
        last.count += count
        last.size_bytes += size

    def _run(self, tensor: InputTensor, count: int) -> Run:
        return Run(tensor.name, tensor.datatype, count, *self._span(tensor, count))

    def _span(self, tensor: InputTensor, count: int) -> tuple[int, int]:
        """Where an input's elements begin, and their bytes. Raises CountMismatchError if its shape wants others."""
        datatype, span = tensor.datatype, self._spans.get(tensor.name, _NO_SPAN)
        if datatype != "BYTES" and span is not _NO_SPAN and span[1] != count * element_bytes(datatype):
            raise _raw(tensor).wrong_size(tensor.name, datatype, count)
        return span

    def _num_candidates(self, dense: InputTensor | None) -> int:
        schema = self._schema
        if schema.candidate_names:
            return self._num_bags[schema.features.index[schema.candidate_names[0]]]
        return dense.shape[0] if dense is not None and len(dense.shape) else 0

    def _counts(self, num_candidates: int) -> Int64Array:
        """int64 [F], bags of each feature."""
        schema = self._schema
        counts, expected = np.array(self._num_bags, dtype=np.int64), schema.bags_per_key(num_candidates)
        if (counts != expected).any():
            key = int((counts != expected).argmax())
            first = schema.candidate_names[0]
            raise CountMismatchError(
                input_path(schema.names[key]),
                f"{self._num_bags[key]} candidates, but {input_path(first)} has {num_candidates}",
            )
        return counts

    def _ragged_bags(self, counts: Int64Array, lengths: Int64Array) -> RaggedBags | None:
        if not self._ragged:
            return None
        keys = tuple(self._ragged)
        is_ragged = np.zeros(counts.size, dtype=np.bool_)
        is_ragged[list(keys)] = True
        return RaggedBags(tuple(self._ragged.values()), keys, lengths, np.repeat(is_ragged, counts))

    def _weights(self) -> Iterator[tuple[int, Run]]:
        if not self._has_optional:
            return
        for key, name in enumerate(self._schema.names):
            tensor = self._given.get(name + WEIGHTS_SUFFIX) if name in self._schema.weighted_names else None
            if tensor is None:
                continue
            shape = list(self._given[name].shape)
            if list(tensor.shape) != shape:
                raise _wrong_shape(tensor, f"it must be that of its ids, {shape}")
            _check_floats(tensor)
            yield key, self._run(tensor, element_count(tensor))

    def _dense(self, name: str, *allowed: Sequence[int]) -> Run | None:
        tensor = self._given.get(name)
        if tensor is None:
            return None
        if tuple(tensor.shape) not in allowed:
            raise CountMismatchError(
                f"{input_path(name)}.shape", f"{list(tensor.shape)[:8]}; it must be {list(allowed[0])}"
            )
        _check_floats(tensor)
        return self._run(tensor, element_count(tensor))


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


def _raw(tensor: InputTensor) -> RawData:
    data = tensor.data
    if not isinstance(data, RawData):
        raise TypeError(f"input {tensor.name!r} is not binary")
    return data


def _check_integers(tensor: InputTensor) -> None:
    if tensor.datatype not in _INTEGER_TYPES:
        path = f"{input_path(tensor.name)}.datatype"
        raise InvalidIdError(path, f"{tensor.datatype[:16]!r}; it must be INT64 or INT32")


def _check_floats(tensor: InputTensor) -> None:
    if tensor.datatype != "FP32":
        raise InvalidFieldError(f"{input_path(tensor.name)}.datatype", f"{tensor.datatype[:16]!r}; it must be FP32")


def _wrong_shape(tensor: InputTensor, allowed: str) -> CountMismatchError:
    return CountMismatchError(f"{input_path(tensor.name)}.shape", f"{list(tensor.shape)[:8]}; {allowed}")
