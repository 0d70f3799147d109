"""The gRPC form of inference requests, `inference.ModelInferRequest`, read by walking over its tags."""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import repeat

import numpy as np

from serving.errors import (
    CountMismatchError,
    InvalidFieldError,
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
    decode_text,
    input_path,
    output_of,
    parse_version,
)
from serving.formats.protobuf import (
    MAX_VARINT_BYTES,
    Message,
    count_varints,
    decode_varints,
    encode_field,
    encode_varint,
    signed,
)
from serving.formats.requests import Answer, Buffer, Encoded, Method, Options, RankAnswer, RankRequest
from serving.formats.schema import OUTPUT_NAMES, RequestSchema
from serving.limits import RequestLimits
from shard_node.bags import Float32Array

_NAME = "inference.ModelInferRequest"
_MAX_TEXT_BYTES = 4096
# Numbers of fields with their wire types: 0 varint, 1 eight bytes, 2 with a length, 5 four bytes.
_TEXTS = {1 << 3 | 2: "model_name", 2 << 3 | 2: "model_version", 3 << 3 | 2: "id"}
_PARAMETERS, _INPUTS, _OUTPUTS, _RAW = (number << 3 | 2 for number in (4, 5, 6, 7))
_INPUT_NAME, _DATATYPE, _SHAPE, _INPUT_PARAMETERS, _CONTENTS = (number << 3 | 2 for number in (1, 2, 3, 4, 5))
_SHAPE_ONE = 3 << 3
_KEY, _VALUE = 1 << 3 | 2, 2 << 3 | 2
_CHOICES = {
    1 << 3: "bool_param",
    2 << 3: "int64_param",
    3 << 3 | 2: "string_param",
    4 << 3 | 1: "double_param",
    5 << 3: "uint64_param",
}
_INTEGER_CHOICES = ("int64_param", "uint64_param")
_MAX_SHAPE_DIMS = 8
# The field of each datatype's elements, packed or one by one. Varints of either size are read alike.
_FIELDS = {
    "INT32": ("int_contents", 2 << 3 | 2, 2 << 3),
    "INT64": ("int64_contents", 3 << 3 | 2, 3 << 3),
    "FP32": ("fp32_contents", 6 << 3 | 2, 6 << 3 | 5),
    "BYTES": ("bytes_contents", 8 << 3 | 2, 8 << 3 | 2),
}


class InferGrpcCodec:
    """Reads `ModelInferRequest` and writes `ModelInferResponse`, always with raw contents.

    Args:
        new_id: makes the id of an answer whose request has none.
    """

    api = "oip_grpc"
    method: Method = "rank"

    def __init__(self, new_id: Callable[[], str] = ANSWER_IDS) -> None:
        self._new_id = new_id

    def read(self, body: Buffer, limits: RequestLimits) -> InferGrpcRequest:
        """Read a message up to its tensors' elements.

        Raises:
            MalformedRequestError: it is no such message.
            LimitExceededError: it has more fields, inputs or outputs than allowed.
            InvalidFieldError: for a value that can't be.
            UnsupportedExtensionError: for a part of the protocol's extensions that is not spoken here.
        """
        data = bytes(body) if isinstance(body, memoryview) else body
        message = Message(data, _NAME, limits.max_message_fields)
        texts = {"model_name": "", "model_version": "", "id": ""}
        parameters: dict[str, tuple[str, object]] = {}
        inputs: list[tuple[int, int]] = []
        raw: list[tuple[int, int]] = []
        outputs: list[str] = []
        for tag, start, end in message.fields():
            if tag == _INPUTS:
                inputs.append((start, end))
                _check_number("inputs", MAX_INPUTS, len(inputs))
            elif tag == _RAW:
                raw.append((start, end))
                _check_number("raw_input_contents", MAX_INPUTS, len(raw))
            elif tag == _OUTPUTS:
                outputs.append(_output(message, start, end))
                _check_number("outputs", MAX_OUTPUTS, len(outputs))
            elif tag == _PARAMETERS:
                name, value = _parameter(message, start, end)
                parameters[name] = value
            elif (field := _TEXTS.get(tag)) is not None:
                texts[field] = _text(message, field, start, end)
        if not texts["model_name"]:
            raise InvalidFieldError("model", "it is empty; it must be the name of a served model")
        if parameters.get("sequence_id", ("", 0))[1]:
            raise UnsupportedExtensionError("parameters.sequence_id", "requests here belong to no sequence")
        if raw and len(raw) != len(inputs):
            problem = f"{len(raw)} of them; there must be one for each of {len(inputs)} inputs"
            raise InvalidFieldError("raw_input_contents", problem)
        options = Options(
            _integer(parameters, "timeout_ms"),
            # Triton's clients send 0 for none.
            _integer(parameters, "timeout") or None,
            _integer(parameters, "top_k"),
            texts["id"],
            _string(parameters, "routing_key"),
        )
        tensors = [
            _tensor(message, own, span) for own, span in zip(inputs, raw or repeat(None, len(inputs)), strict=True)
        ]
        version = parse_version(texts["model_version"])
        return InferGrpcRequest(
            InferRequest(texts["model_name"], version, tensors, outputs or None, options), self._new_id
        )


class InferGrpcRequest:
    """An inference request that came over gRPC.

    Args:
        request: what is asked.
        new_id: makes the id of an answer whose request has none.
    """

    def __init__(self, request: InferRequest, new_id: Callable[[], str]) -> None:
        self.model, self.version, self.key = request.model, request.version, request.key
        self._request = request
        self._new_id = new_id

    def parse(self, schema: RequestSchema) -> RankRequest:
        """See `Unparsed`."""
        return self._request.parse(schema)

    def encode(self, answer: Answer) -> Encoded:
        """Write a ModelInferResponse."""
        if not isinstance(answer, RankAnswer):
            raise TypeError("only scores are answered by the Open Inference Protocol")
        parts = [
            encode_field(1, answer.model.encode()),
            encode_field(2, str(answer.version).encode()),
            encode_field(3, (answer.request_id or self._new_id()).encode()),
        ]
        raw = []
        for name in self._request.outputs or OUTPUT_NAMES:
            datatype, values = output_of(answer, name)
            tensor = (
                encode_field(1, name.encode()),
                encode_field(2, datatype.encode()),
                encode_field(3, encode_varint(values.size)),
            )
            parts.append(encode_field(5, b"".join(tensor)))
            raw.append(encode_field(6, values.tobytes()))
        return Encoded(b"".join((*parts, *raw)))


class ContentsData:
    """Elements in the typed fields of `InferTensorContents`. Raw contents are faster.

    Args:
        message: that they are in.
        start, end: where the contents lie.
    """

    __slots__ = ("_end", "_message", "_start")

    def __init__(self, message: Message, start: int, end: int) -> None:
        self._message = message
        self._start = start
        self._end = end

    def integers(self, name: str, datatype: IntegerType, count: int) -> Integers:
        """As `TensorData`."""
        field, packed_tag, one_tag = _FIELDS[datatype]
        # However they come, in chunks or one by one, they are decoded together.
        varints, view = bytearray(), memoryview(self._message.data)
        for tag, start, end in self._message.fields(self._start, self._end):
            if tag == packed_tag:
                if end > start and view[end - 1] > 127:
                    raise self._message.malformed("a packed field that breaks off")
                varints += view[start:end]
            elif tag == one_tag:
                varints += encode_varint(start)
        packed = np.frombuffer(varints, np.uint8)
        self._check_count(name, field, count_varints(packed), count)
        try:
            values = decode_varints(packed)
        except ValueError as error:
            raise self._message.malformed(str(error)) from None
        return values.astype(np.int32) if datatype == "INT32" else values

    def floats(self, name: str, count: int) -> Float32Array:
        """As `TensorData`."""
        field, packed_tag, one_tag = _FIELDS["FP32"]
        data, view = bytearray(), memoryview(self._message.data)
        for tag, start, end in self._message.fields(self._start, self._end):
            if tag in (packed_tag, one_tag):
                data += view[start:end]
        if len(data) % 4:
            raise MalformedRequestError(f"{input_path(name)}.contents.{field}", "a packed field that breaks off")
        self._check_count(name, field, len(data) // 4, count)
        return np.frombuffer(data, "<f4")

    def texts(self, name: str, count: int) -> list[str]:
        """As `TensorData`."""
        field, tag_of_text, _ = _FIELDS["BYTES"]
        spans = [(start, end) for tag, start, end in self._message.fields(self._start, self._end) if tag == tag_of_text]
        self._check_count(name, field, len(spans), count)
        data = self._message.data
        return [
            decode_text(input_path(name), position, bytes(data[start:end]))
            for position, (start, end) in enumerate(spans)
        ]

    def _check_count(self, name: str, field: str, got: int, count: int) -> None:
        if got != count:
            said = f"{got} elements" if got < count else f"{got} elements or more"
            path = f"{input_path(name)}.contents.{field}"
            raise CountMismatchError(path, f"{said}; the tensor's shape holds {count}")


def _tensor(message: Message, span: tuple[int, int], raw: tuple[int, int] | None) -> Tensor:
    name, datatype, shape = "", "", list[int]()
    contents: tuple[int, int] | None = None
    has_region = False
    for tag, start, end in message.fields(*span):
        if tag == _INPUT_NAME:
            name = _text(message, "inputs", start, end)
        elif tag == _DATATYPE:
            datatype = _text(message, "inputs", start, end)
        elif tag == _SHAPE:
            if end - start > _MAX_SHAPE_DIMS * MAX_VARINT_BYTES or len(shape) > _MAX_SHAPE_DIMS:
                raise CountMismatchError(f"{input_path(name)}.shape", "more dimensions than any tensor here has")
            shape += message.varints(start, end)
        elif tag == _SHAPE_ONE:
            if len(shape) > _MAX_SHAPE_DIMS:
                raise CountMismatchError(f"{input_path(name)}.shape", "more dimensions than any tensor here has")
            shape.append(signed(start))
        elif tag == _CONTENTS:
            if contents is not None:
                raise MalformedRequestError(f"{input_path(name)}.contents", "it is there twice")
            contents = start, end
        elif tag == _INPUT_PARAMETERS:
            has_region |= _parameter(message, start, end)[0] == "shared_memory_region"
    if has_region:
        path = f"{input_path(name)}.parameters.shared_memory_region"
        raise UnsupportedExtensionError(path, "it is not spoken here")
    if raw is not None and contents is not None:
        raise InvalidFieldError(f"{input_path(name)}.contents", "it is given beside raw_input_contents")
    data: TensorData
    if raw is not None:
        data = RawData(message.data, raw[0], raw[1] - raw[0])
    else:
        data = ContentsData(message, *(contents or (0, 0)))
    return Tensor(name, datatype, shape, data)


def _output(message: Message, start: int, end: int) -> str:
    name = ""
    for tag, at, stop in message.fields(start, end):
        if tag == 1 << 3 | 2:
            name = _text(message, "outputs", at, stop)
        elif tag == 2 << 3 | 2:
            extension = _parameter(message, at, stop)[0]
            if extension in ("shared_memory_region", "classification"):
                raise UnsupportedExtensionError(f"outputs.parameters.{extension}", "it is not spoken here")
    return name


def _parameter(message: Message, start: int, end: int) -> tuple[str, tuple[str, object]]:
    """Name, and which kind of value and the value, of an entry of a map of parameters."""
    name, choice = "", ""
    value: object = None
    for tag, at, stop in message.fields(start, end):
        if tag == _KEY:
            name = _text(message, "parameters", at, stop)
        elif tag == _VALUE:
            for inner, first, last in message.fields(at, stop):
                choice = _CHOICES.get(inner, choice)
                if inner == 3 << 3 | 2:
                    value = _text(message, f"parameters.{name}", first, last)
                elif inner == 4 << 3 | 1:
                    value = struct.unpack_from("<d", message.data, first)[0]
                elif inner in _CHOICES:
                    value = signed(first) if inner == 2 << 3 else first
    return name, (choice, value)


def _integer(parameters: dict[str, tuple[str, object]], name: str) -> int | None:
    choice, value = parameters.get(name, ("", None))
    if value is None:
        return None
    if choice not in _INTEGER_CHOICES or not isinstance(value, int):
        raise InvalidFieldError(f"parameters.{name}", f"it is a {choice}; it must be an int64_param")
    return value


def _string(parameters: dict[str, tuple[str, object]], name: str) -> str:
    choice, value = parameters.get(name, ("", None))
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InvalidFieldError(f"parameters.{name}", f"it is a {choice}; it must be a string_param")
    return value


def _text(message: Message, field: str, start: int, end: int) -> str:
    if end - start > _MAX_TEXT_BYTES:
        raise LimitExceededError(field, "text", _MAX_TEXT_BYTES, end - start, "bytes")
    return message.text(start, end, field)


def _check_number(field: str, allowed: int, got: int) -> None:
    if got > allowed:
        raise LimitExceededError(field, field, allowed, got, field)
