"""Inference requests of the Open Inference Protocol v2: named tensors, to the flat arrays of a rank request.

What is the same over HTTP and gRPC: which inputs a model has, what shapes they may have, and where their elements go.
How elements lie is each transport's own (`TensorData`). docs/open-inference-protocol.md says what is taken.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from loader.fingerprint import fingerprint_strings
from serving.errors import (
    CountMismatchError,
    InvalidFieldError,
    InvalidIdError,
    LimitExceededError,
    MalformedRequestError,
    MissingFeatureError,
)
from serving.formats.checks import check_num_candidates, keyed_bags, rank_request
from serving.formats.requests import Buffer, Options, RankAnswer, RankRequest
from serving.formats.schema import (
    CANDIDATE_DENSE,
    CONTEXT_DENSE,
    LENGTHS_SUFFIX,
    MAX_NAMES_SHOWN,
    OUTPUT_NAMES,
    SCORES,
    WEIGHTS_SUFFIX,
    InputNames,
    RequestSchema,
)
from serving.limits import MAX_ID
from shard_node.bags import Float32Array, Int64Array

IntegerType: TypeAlias = Literal["INT64", "INT32"]
Integers: TypeAlias = Int64Array | npt.NDArray[np.int32]
MAX_INPUTS = 16_384
MAX_OUTPUTS = 16
MAX_VERSION_CHARS = 19
MAX_NAME_CHARS = 128
_DTYPES: dict[str, np.dtype[Any]] = {"INT64": np.dtype("<i8"), "INT32": np.dtype("<i4"), "FP32": np.dtype("<f4")}
_TEXT_LENGTH = Struct("<I")
_INTEGER_TYPES = ("INT64", "INT32")


class TensorData(Protocol):
    """The elements of one tensor, in one of the protocol's forms.

    Each method is told how many there must be, and raises CountMismatchError for another number of them, and
    MalformedRequestError, InvalidFieldError or InvalidIdError for what is no such element; `name` is the input's.
    """

    def integers(self, name: str, datatype: IntegerType, count: int) -> Integers:
        """int64 or int32 [count]."""
        ...

    def floats(self, name: str, count: int) -> Float32Array:
        """float32 [count]; NaN and inf are not looked for."""
        ...

    def texts(self, name: str, count: int) -> list[str]:
        """Strings, as many as `count`."""
        ...


class Tensor(NamedTuple):
    """One input.

    Attributes:
        name: which one.
        datatype: as the client names it.
        shape: as the client gives it, of at most three dimensions; not checked.
        data: its elements.
    """

    name: str
    datatype: str
    shape: Sequence[int]
    data: TensorData


@dataclass(slots=True, eq=False)
class InferRequest:
    """One inference request, whatever it came over; its tensors are not decoded yet.

    Attributes:
        model: its name.
        version: the one that must answer; None for the live one, or the canary.
        inputs: in the client's order.
        outputs: names of those asked for, in order; None for all.
        options: deadline, top_k, id and routing key.
    """

    model: str
    version: int | None
    inputs: Sequence[Tensor]
    outputs: Sequence[str] | None
    options: Options

    @property
    def key(self) -> str:
        """What a canary is chosen by, or ""."""
        return self.options.routing_key or self.options.request_id

    def parse(self, schema: RequestSchema) -> RankRequest:
        """Read and check the tensors.

        Raises:
            BadRequestError: one of its subclasses, naming the input, the value and what is allowed.
            AmbiguousInputsError: the model can't be called by this protocol.
        """
        for name in self.outputs or ():
            if name not in OUTPUT_NAMES:
                raise InvalidFieldError("outputs", f"there is no output {name[:128]!r}; there are {list(OUTPUT_NAMES)}")
        if self.outputs and len(set(self.outputs)) != len(self.outputs):
            raise InvalidFieldError("outputs", "an output is asked for twice")
        return _Inputs(schema, _by_name(schema.inputs, self.inputs)).request(self.options)


def output_of(answer: RankAnswer, name: str) -> tuple[str, npt.NDArray[Any]]:
    """Datatype and elements of an output, little-endian."""
    if name == SCORES:
        return "FP32", answer.scores.astype("<f4", copy=False)
    return "INT64", answer.order.astype("<i8", copy=False)


class _Inputs:
    """The inputs of one request, feature by feature in flat order."""

    def __init__(self, schema: RequestSchema, given: Mapping[str, Tensor]) -> None:
        self._schema = schema
        self._given = given
        self._num_required = len(schema.inputs.required)
        self._counts: list[int] = []
        self._num_bags: list[int] = []
        self._widths: list[int] = []
        self._own_lengths: dict[int, Tensor] = {}

    def request(self, options: Options) -> RankRequest:
        schema = self._schema
        self._read_shapes()
        dense = self._given.get(CANDIDATE_DENSE)
        if schema.candidate_names:
            num_candidates = self._num_bags[schema.features.index[schema.candidate_names[0]]]
        else:
            num_candidates = dense.shape[0] if dense is not None and len(dense.shape) else 0
        check_num_candidates(schema.limits, num_candidates)
        bags_per_key, lengths = self._bags(num_candidates)
        values, texts = self._values()
        bags = keyed_bags(
            schema, schema.keys, bags_per_key, lengths, np.array(self._counts, np.int64), values, self._weights()
        )
        kc, kd = schema.num_context_dense, schema.num_candidate_dense
        context_dense = self._dense(CONTEXT_DENSE, (kc,), (1, kc)).reshape(kc)
        candidate_dense = self._dense(CANDIDATE_DENSE, (num_candidates, kd)).reshape(num_candidates, kd)
        return rank_request(schema, bags, num_candidates, context_dense, candidate_dense, options, texts)

    def _read_shapes(self) -> None:
        """Take the counts of each feature: ids, bags, and ids of each bag where all have as many."""
        given, limits, has_optional = self._given, self._schema.limits, len(self._given) > self._num_required
        counts, all_bags, widths = self._counts, self._num_bags, self._widths
        for key, (name, is_context, is_string) in enumerate(self._schema.kinds):
            tensor = given[name]
            shape, datatype = tensor.shape, tensor.datatype
            is_flat = len(shape) == 1
            count = shape[0] if is_flat and 0 <= shape[0] <= MAX_ID else element_count(tensor)
            if count > limits.max_ids_per_request:
                allowed = limits.max_ids_per_request
                raise LimitExceededError(input_path(name), "max_ids_per_request", allowed, count, "ids")
            num_bags, width = (shape[0], 1) if is_flat else shape
            if is_context:
                if not is_flat and num_bags != 1:
                    raise _wrong_shape(tensor, "a context feature has [ids] or [1, ids]")
                num_bags, width = 1, count
            elif has_optional and (lengths := given.get(name + LENGTHS_SUFFIX)) is not None:
                if not is_flat:
                    raise _wrong_shape(tensor, f"with {name}{LENGTHS_SUFFIX} it must be [ids]")
                num_bags, width = element_count(lengths), 0
                if lengths.datatype not in _INTEGER_TYPES:
                    _check_datatype(lengths, _INTEGER_TYPES, InvalidIdError)
                self._own_lengths[key] = lengths
            if not is_context and not 0 < num_bags <= limits.max_candidates:
                check_num_candidates(limits, num_bags)
            if is_string or datatype not in _INTEGER_TYPES:
                _check_datatype(tensor, ("BYTES",) if is_string else _INTEGER_TYPES, InvalidIdError)
            counts.append(count)
            all_bags.append(num_bags)
            widths.append(width)

    def _bags(self, num_candidates: int) -> tuple[Int64Array, Int64Array]:
        """int64 [F], bags of each feature, and int64 [B], ids of each bag."""
        schema = self._schema
        given, expected = np.array(self._num_bags, np.int64), schema.bags_per_key(num_candidates)
        if not np.array_equal(given, expected):
            key = int((given != expected).argmax())
            first = input_path(schema.candidate_names[0])
            raise CountMismatchError(
                input_path(schema.names[key]), f"{given[key]} candidates, but {first} has {num_candidates}"
            )
        total, allowed = sum(self._counts), schema.limits.max_ids_per_request
        if total > allowed:
            raise LimitExceededError("sparse", "max_ids_per_request", allowed, total, "ids over all features")
        if not self._own_lengths:
            return given, np.repeat(np.array(self._widths, np.int64), given)
        each = [
            tensor.data.integers(tensor.name, cast(IntegerType, tensor.datatype), num_candidates)
            for tensor in self._own_lengths.values()
        ]
        own = np.concatenate(each, dtype=np.int64)
        keys = np.array(list(self._own_lengths), np.intp)
        counts = np.array(self._counts, np.int64)[keys]
        # Bounded before they are summed, so that no sum wraps around; each of these features has a bag for a candidate.
        if int(np.minimum.reduce(own)) < 0 or int(np.maximum.reduce(own)) > total:
            self._refuse_lengths(each)
        if not np.array_equal(np.add.reduce(own.reshape(-1, num_candidates), axis=1), counts):
            self._refuse_lengths(each)
        if len(each) == given.size:
            return given, own
        is_own = np.zeros(given.size, np.bool_)
        is_own[keys] = True
        lengths = np.repeat(np.array(self._widths, np.int64), given)
        lengths[np.repeat(is_own, given)] = own
        return given, lengths

    def _refuse_lengths(self, each: Sequence[Integers]) -> None:
        """Raise the error for lengths of which some do not fit their ids."""
        for (key, tensor), own in zip(self._own_lengths.items(), each, strict=True):
            most = self._counts[key]
            wrong = (own < 0) | (own > most)
            if wrong.any():
                position = int(wrong.argmax())
                path = f"{input_path(tensor.name)}[{position}]"
                raise InvalidFieldError(path, f"{own[position]} is not in 0..{most}, the number of ids")
            if (said := int(own.sum(dtype=np.int64))) != most:
                raise CountMismatchError(input_path(tensor.name), f"they add up to {said}, but there are {most} ids")

    def _values(self) -> tuple[Int64Array, Sequence[str]]:
        schema, texts = self._schema, list[str]()
        parts: list[Integers] = []
        num_texts, allowed = (
            sum(itertools.compress(self._counts, schema.is_string.tolist())),
            schema.limits.max_string_ids,
        )
        if num_texts > allowed:
            raise LimitExceededError("inputs", "max_string_ids", allowed, num_texts, "string ids")
        for name, count in zip(schema.names, self._counts, strict=True):
            tensor = self._given[name]
            if tensor.datatype == "BYTES":
                own = tensor.data.texts(name, count)
                parts.append(fingerprint_strings(own))
                texts += own
            else:
                parts.append(tensor.data.integers(name, cast(IntegerType, tensor.datatype), count))
        return np.concatenate(parts, dtype=np.int64) if parts else np.empty(0, np.int64), texts

    def _weights(self) -> Float32Array | None:
        """float32 [n], 1 where a feature has none; None if none has."""
        schema, weights = self._schema, None
        for key, name in enumerate(schema.names):
            tensor = self._given.get(name + WEIGHTS_SUFFIX) if name in schema.weighted_names else None
            if tensor is None:
                continue
            shape = list(self._given[name].shape)
            if list(tensor.shape) != shape:
                raise _wrong_shape(tensor, f"it must be that of its ids, {shape}")
            _check_datatype(tensor, ("FP32",), InvalidFieldError)
            if weights is None:
                weights = np.ones(sum(self._counts), np.float32)
            start = sum(self._counts[:key])
            weights[start : start + self._counts[key]] = tensor.data.floats(tensor.name, self._counts[key])
        return weights

    def _dense(self, name: str, *allowed: Sequence[int]) -> Float32Array:
        """float32: a copy, because a request's own bytes may be read-only and not aligned."""
        tensor = self._given.get(name)
        if tensor is None:
            return np.empty(allowed[0], np.float32)
        if tuple(tensor.shape) not in allowed:
            shape = list(tensor.shape)[:8]
            raise CountMismatchError(f"{input_path(name)}.shape", f"{shape}; it must be {list(allowed[0])}")
        _check_datatype(tensor, ("FP32",), InvalidFieldError)
        return np.array(tensor.data.floats(name, element_count(tensor)), dtype=np.float32)


class RawData:
    """Elements as they lie in memory: the binary tensor extension of HTTP, and gRPC's raw contents.

    Little-endian, row-major; a BYTES element is a 4-byte length and its bytes. Source:
    https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/protocol/extension_binary_data.html

    Args:
        buffer: that the elements are in.
        start, size_bytes: where.
    """

    __slots__ = ("_buffer", "_size_bytes", "_start")

    def __init__(self, buffer: Buffer, start: int, size_bytes: int) -> None:
        self._buffer = buffer
        self._start = start
        self._size_bytes = size_bytes

    def integers(self, name: str, datatype: IntegerType, count: int) -> Integers:
        """As `TensorData`: a view, maybe read-only and not aligned."""
        return self._numbers(name, datatype, count)

    def floats(self, name: str, count: int) -> Float32Array:
        """As `TensorData`: a view, maybe read-only and not aligned."""
        return self._numbers(name, "FP32", count)

    def _numbers(self, name: str, datatype: str, count: int) -> npt.NDArray[Any]:
        dtype = _DTYPES[datatype]
        if self._size_bytes != count * dtype.itemsize:
            wanted = f"{count} elements of {datatype}, {count * dtype.itemsize} bytes"
            raise CountMismatchError(input_path(name), f"{self._size_bytes} bytes of data; its shape holds {wanted}")
        return np.frombuffer(self._buffer, dtype, count, self._start)

    def texts(self, name: str, count: int) -> list[str]:
        """As `TensorData`. Where an element begins only the one before it tells, so they are read one by one."""
        path, buffer, start = input_path(name), self._buffer, self._start
        end = start + self._size_bytes
        texts: list[str] = []
        while start < end and len(texts) <= count:
            if end - start < _TEXT_LENGTH.size:
                raise MalformedRequestError(
                    path, f"{end - start} bytes are left over after {len(texts)} BYTES elements"
                )
            first = start + _TEXT_LENGTH.size
            start = first + _TEXT_LENGTH.unpack_from(buffer, start)[0]
            if start > end:
                raise MalformedRequestError(path, f"BYTES element {len(texts)} is longer than what is left")
            texts.append(decode_text(path, len(texts), bytes(buffer[first:start])))
        if len(texts) != count:
            got = f"{len(texts)}" if len(texts) < count else f"at least {len(texts)}"
            raise CountMismatchError(path, f"its shape holds {count} elements, its data {got}")
        return texts


class AnswerIds:
    """Ids of answers whose requests have none, that no other answer has. Thread-safe.

    Args:
        prefix: 16 hex digits that set this process apart; random by default.
    """

    def __init__(self, prefix: str | None = None) -> None:
        self._prefix = secrets.token_hex(8) if prefix is None else prefix
        self._count = itertools.count()

    def __call__(self) -> str:
        """32 hex digits."""
        return f"{self._prefix}{next(self._count):016x}"


ANSWER_IDS = AnswerIds()
"""Those of this process."""


def element_count(tensor: Tensor) -> int:
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


def input_path(name: str) -> str:
    """Name an input in errors."""
    return f"inputs.{name[:MAX_NAME_CHARS]}"


def parse_version(text: str) -> int | None:
    """Read a version as the protocol writes it; "" asks for none.

    Raises:
        InvalidFieldError: if it is no positive integer.
    """
    if not text:
        return None
    version = int(text) if text.isascii() and text.isdecimal() and len(text) <= MAX_VERSION_CHARS else 0
    if not 1 <= version <= MAX_ID:
        raise InvalidFieldError("version", f"{text[:40]!r} is not an integer in 1..{MAX_ID}")
    return version


def decode_text(path: str, position: int, element: bytes) -> str:
    """Decode a BYTES element. Raises InvalidIdError if it is not UTF-8."""
    try:
        return element.decode()
    except UnicodeDecodeError as error:
        raise InvalidIdError(f"{path}[{position}]", f"it is not UTF-8: {error.reason}") from None


def _by_name(names: InputNames, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """Inputs by name: all that the model has, but for optional ones, and no other."""
    given = {one.name: one for one in inputs}
    model = names.schema.features.spec.model
    if len(given) != len(inputs):
        seen: set[str] = set()
        twice = next(one.name for one in inputs if one.name in seen or seen.add(one.name))  # type: ignore[func-returns-value]
        raise InvalidFieldError(input_path(twice), "it is given twice")
    if given.keys() == names.required:
        return given
    known = names.by_name
    for name in given:
        if name not in known:
            if len(known) > MAX_NAMES_SHOWN or name in names.schema.features.index:
                raise names.schema.unknown_feature("", name)
            raise InvalidFieldError(input_path(name), f"model {model!r} has no such input; it has {list(known)}")
    for name in known:
        if name in names.required and name not in given:
            raise MissingFeatureError(input_path(name), f"model {model!r} needs it")
    return given


def _check_datatype(
    tensor: Tensor, allowed: tuple[str, ...], error: type[InvalidIdError] | type[InvalidFieldError]
) -> None:
    if tensor.datatype not in allowed:
        raise error(
            f"{input_path(tensor.name)}.datatype", f"{tensor.datatype[:16]!r}; it must be {' or '.join(allowed)}"
        )


def _wrong_shape(tensor: Tensor, allowed: str) -> CountMismatchError:
    return CountMismatchError(f"{input_path(tensor.name)}.shape", f"{list(tensor.shape)[:8]}; {allowed}")
