"""The HTTP form of inference requests: a JSON object, and behind it the binary tensors.

Source: https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/protocol/extension_binary_data.html
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from serving.errors import (
    BodyTooLargeError,
    CountMismatchError,
    InvalidFieldError,
    InvalidIdError,
    LimitExceededError,
    MalformedRequestError,
    UnsupportedExtensionError,
)
from serving.formats.infer import (
    ANSWER_IDS,
    MAX_INPUTS,
    MAX_OUTPUTS,
    InferRequest,
    Integers,
    IntegerType,
    RawData,
    Tensor,
    TensorData,
    input_path,
    output_of,
    parse_version,
)
from serving.formats.json_text import count_above
from serving.formats.requests import Answer, Buffer, Encoded, Method, Options, RankAnswer, RankRequest
from serving.formats.schema import OUTPUT_NAMES, RequestSchema
from serving.limits import RequestLimits
from shard_node.bags import Float32Array

BINARY = "application/octet-stream"
HEADER_LENGTH = "inference-header-content-length"
_ENCODER = msgspec.json.Encoder()
_NESTED = re.compile(rb"\s*\[\s*\[")
_BRACE, _BRACKET, _COMMA = (ord(one) for one in "{[,")
# The objects of an input and of its parameters; of an output, of its parameters, and of the request and its own.
_MAX_OBJECTS = 2 * MAX_INPUTS + 2 * MAX_OUTPUTS + 2
_INTEGERS = (msgspec.json.Decoder(list[int]), msgspec.json.Decoder(list[list[int]]))
_FLOATS = (msgspec.json.Decoder(list[float]), msgspec.json.Decoder(list[list[float]]))
_TEXTS = (msgspec.json.Decoder(list[str]), msgspec.json.Decoder(list[list[str]]))
_DTYPES: dict[IntegerType, Any] = {"INT64": np.int64, "INT32": np.int32}


class _Parameters(msgspec.Struct, gc=False):
    timeout_ms: int | None = None
    timeout: int | None = None
    top_k: int | None = None
    routing_key: str | None = None
    binary_data_output: bool | None = None
    sequence_id: int | str | None = None


class _InputParameters(msgspec.Struct, gc=False):
    binary_data_size: int | None = None
    shared_memory_region: str | None = None


class _Input(msgspec.Struct, gc=False):
    name: str
    shape: list[int]
    datatype: str
    parameters: _InputParameters | None = None
    data: msgspec.Raw | UnsetType = UNSET


class _OutputParameters(msgspec.Struct, gc=False):
    binary_data: bool | None = None
    classification: int | None = None
    shared_memory_region: str | None = None


class _Output(msgspec.Struct, gc=False):
    name: str
    parameters: _OutputParameters | None = None


class _Body(msgspec.Struct, gc=False, kw_only=True):
    inputs: list[_Input]
    id: str | None = None
    outputs: list[_Output] | None = None
    parameters: _Parameters | None = None


_BODY = msgspec.json.Decoder(_Body)
_NO_PARAMETERS = _Parameters()


class InferHttpCodec:
    """Reads `POST /v2/models/{model}[/versions/{version}]/infer` and writes its answer.

    Args:
        model, version: from the path; version "" for the live one.
        header_length: the header `Inference-Header-Content-Length`; None without it.
        new_id: makes the id of an answer whose request has none.
    """

    api = "oip_http"
    method: Method = "rank"

    def __init__(
        self, model: str, version: str, header_length: str | None, new_id: Callable[[], str] = ANSWER_IDS
    ) -> None:
        self._model = model
        self._version = version
        self._header_length = header_length
        self._new_id = new_id

    def read(self, body: Buffer, limits: RequestLimits) -> InferHttpRequest:
        """Read the JSON object.

        Raises:
            MalformedRequestError: it is no such JSON object.
            BodyTooLargeError: it is longer than JSON may be.
            InvalidFieldError: for a value that can't be, or binary data that don't fill the body.
            UnsupportedExtensionError: for a part of the protocol's extensions that is not spoken here.
        """
        version, view = parse_version(self._version), memoryview(body)
        length = parse_header_length(self._header_length, len(view))
        header = view if length is None else view[:length]
        if len(header) > limits.max_json_bytes:
            raise BodyTooLargeError("", "max_json_bytes", limits.max_json_bytes, len(header), "bytes of JSON")
        if count_above(header, _BRACE, _MAX_OBJECTS):
            raise InvalidFieldError(
                "inputs", f"more than {_MAX_OBJECTS} objects; at most {MAX_INPUTS} inputs are taken"
            )
        decoded = _decode(header)
        parameters = decoded.parameters or _NO_PARAMETERS
        if parameters.sequence_id:
            raise UnsupportedExtensionError("parameters.sequence_id", "requests here belong to no sequence")
        outputs = decoded.outputs or []
        if len(outputs) > MAX_OUTPUTS:
            raise LimitExceededError("outputs", "outputs", MAX_OUTPUTS, len(outputs), "outputs")
        for one in outputs:
            for extension in ("classification", "shared_memory_region"):
                if one.parameters is not None and getattr(one.parameters, extension):
                    raise UnsupportedExtensionError(f"outputs.parameters.{extension}", "it is not spoken here")
        # Triton's clients send a timeout of 0 for none.
        options = Options(
            parameters.timeout_ms, parameters.timeout or None, parameters.top_k, decoded.id or "",
            parameters.routing_key or "",
        )  # fmt: skip
        request = InferRequest(
            self._model,
            version,
            _tensors(decoded.inputs, view, len(header)),
            [one.name for one in outputs] or None,
            options,
        )
        is_binary = bool(parameters.binary_data_output)
        chosen = [one.parameters.binary_data if one.parameters is not None else None for one in outputs]
        return InferHttpRequest(request, [is_binary if one is None else one for one in chosen], is_binary, self._new_id)


class InferHttpRequest:
    """An inference request, and how its answer shall look.

    Args:
        request: what is asked.
        are_binary: of each output that is asked for, whether it shall be binary.
        is_binary: the same of all, if none is named.
        new_id: makes the id of an answer whose request has none.
    """

    def __init__(
        self, request: InferRequest, are_binary: list[bool], is_binary: bool, new_id: Callable[[], str]
    ) -> None:
        self.model, self.version, self.key = request.model, request.version, request.key
        self._request = request
        self._are_binary = are_binary
        self._is_binary = is_binary
        self._new_id = new_id

    def parse(self, schema: RequestSchema) -> RankRequest:
        """See `Unparsed`."""
        return self._request.parse(schema)

    def encode(self, answer: Answer) -> Encoded:
        """Write the answer: JSON, and binary tensors behind it if any were asked for."""
        if not isinstance(answer, RankAnswer):
            raise TypeError("only scores are answered by the Open Inference Protocol")
        names = self._request.outputs or OUTPUT_NAMES
        are_binary = self._are_binary or [self._is_binary] * len(names)
        outputs: list[dict[str, Any]] = []
        tensors: list[bytes] = []
        for name, is_binary in zip(names, are_binary, strict=True):
            datatype, values = output_of(answer, name)
            output: dict[str, Any] = {"name": name, "datatype": datatype, "shape": values.shape}
            if is_binary:
                data = values.tobytes()
                output["parameters"] = {"binary_data_size": len(data)}
                tensors.append(data)
            else:
                output["data"] = values.tolist()
            outputs.append(output)
        answer_id = answer.request_id or self._new_id()
        header = _ENCODER.encode(
            {"id": answer_id, "model_name": answer.model, "model_version": str(answer.version), "outputs": outputs}
        )
        if not tensors:
            return Encoded(header)
        return Encoded(b"".join((header, *tensors)), BINARY, ((HEADER_LENGTH, str(len(header))),))


class JsonData:
    """Elements as JSON text, the nested or the flat list, not decoded yet.

    Args:
        text: valid JSON.
        shape: as the client gives it; a nested list must be of this shape.
    """

    __slots__ = ("_shape", "_text")

    def __init__(self, text: bytes | memoryview, shape: Sequence[int]) -> None:
        self._text = text
        self._shape = shape

    def integers(self, name: str, datatype: IntegerType, count: int) -> Integers:
        """As `TensorData`."""
        elements = self._elements(name, _INTEGERS, count)
        try:
            return np.fromiter(elements, _DTYPES[datatype], count=len(elements))
        except OverflowError:
            bound = np.iinfo(_DTYPES[datatype])
            position = next(number for number, one in enumerate(elements) if not bound.min <= one <= bound.max)
            problem = f"{str(elements[position])[:40]} is not an {datatype}"
            raise InvalidIdError(f"{input_path(name)}[{position}]", problem) from None

    def floats(self, name: str, count: int) -> Float32Array:
        """As `TensorData`; what float32 can't hold becomes inf."""
        elements = self._elements(name, _FLOATS, count)
        with np.errstate(over="ignore"):
            return np.fromiter(elements, np.float32, count=len(elements))

    def texts(self, name: str, count: int) -> list[str]:
        """As `TensorData`. The decoder refuses lone surrogates."""
        return self._elements(name, _TEXTS, count)

    def _elements(self, name: str, decoders: tuple[Any, Any], count: int) -> list[Any]:
        path = input_path(name)
        # Each element but the first brings a comma, and each list a bracket: more of them prove another number of
        # elements, before any is decoded. In strings they only add to the count.
        text = bytes(self._text)
        rows = max(self._shape[0], 0) if len(self._shape) else 0
        if commas := count_above(text, _COMMA, count + rows):
            raise _wrong_count(path, count, f"at least {commas - rows}")
        if count_above(text, _BRACKET, rows + 1):
            raise CountMismatchError(path, f"its nested data does not have the shape {list(self._shape)}")
        nested = _NESTED.match(text) is not None
        try:
            decoded = decoders[nested].decode(text)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidFieldError(path, f"its data is not what its datatype says: {error}") from None
        if nested and [len(decoded), *set(map(len, decoded))] != list(self._shape):
            raise CountMismatchError(path, f"its nested data does not have the shape {list(self._shape)}")
        elements: list[Any] = list(chain.from_iterable(decoded)) if nested else decoded
        if len(elements) != count:
            raise _wrong_count(path, count, str(len(elements)))
        return elements


def parse_header_length(text: str | None, body_bytes: int) -> int | None:
    """Read `Inference-Header-Content-Length`; None without one.

    Raises:
        InvalidFieldError: if it is no number of bytes that the body has.
    """
    if text is None:
        return None
    length = int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else -1
    if not 1 <= length <= body_bytes:
        problem = f"{text[:40]!r} is not in 1..{body_bytes}, the bytes of the body"
        raise InvalidFieldError(HEADER_LENGTH, problem)
    return length


def _decode(header: memoryview) -> _Body:
    try:
        return _BODY.decode(header)
    except (msgspec.ValidationError, RecursionError) as error:
        raise InvalidFieldError("", str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedRequestError("", f"the request is not JSON: {error}") from None


def _tensors(decoded: Sequence[_Input], body: memoryview, start: int) -> list[Tensor]:
    if len(decoded) > MAX_INPUTS:
        raise InvalidFieldError("inputs", f"{len(decoded)} inputs; at most {MAX_INPUTS} are taken")
    tensors = []
    for one in decoded:
        size = None
        if one.parameters is not None:
            if one.parameters.shared_memory_region is not None:
                raise UnsupportedExtensionError(
                    f"{input_path(one.name)}.parameters.shared_memory_region", "shared memory is not taken"
                )
            size = one.parameters.binary_data_size
        data: TensorData
        if size is None:
            if isinstance(one.data, UnsetType):
                raise InvalidFieldError(input_path(one.name), "it has neither data nor parameters.binary_data_size")
            data = JsonData(one.data, one.shape)
        elif not 0 <= size <= len(body) - start:
            raise InvalidFieldError(
                f"{input_path(one.name)}.parameters.binary_data_size",
                f"{size} is not in 0..{len(body) - start}, the bytes left behind the JSON object",
            )
        else:
            data = RawData(body, start, size)
            start += size
        tensors.append(Tensor(one.name, one.datatype, one.shape, data))
    if start != len(body):
        raise InvalidFieldError("", f"{len(body) - start} bytes are left behind the last input's binary data")
    return tensors


def _wrong_count(path: str, count: int, got: str) -> CountMismatchError:
    return CountMismatchError(path, f"its shape holds {count} elements, its data {got}")
