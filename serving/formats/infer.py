"""Inference requests of the Open Inference Protocol v2, over HTTP and gRPC: named tensors to a rank request.

Over HTTP a request is a JSON object, followed by the binary tensors; over gRPC an `inference.ModelInferRequest`.
docs/open-inference-protocol.md says what is accepted. Source of the binary tensors:
https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/protocol/extension_binary_data.html
"""

from __future__ import annotations

import itertools
import math
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from struct import unpack_from
from typing import Annotated, Any, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET, UnsetType

from loader.snapshot.manifest import MAX_OUTPUTS
from serving.errors import (
    InvalidRequestError,
    count_mismatch,
    invalid_field,
    limit_exceeded,
    malformed,
    missing_feature,
)
from serving.formats.bags import (
    DTYPES,
    INTEGERS,
    RAGGED,
    FeatureCounts,
    Tensor,
    array_of,
    check_num_candidates,
    input_path,
    rank_request,
    text_of,
    wrong_count,
)
from serving.formats.json_reader import count_above
from serving.formats.protobuf import (
    MAX_VARINT_BYTES,
    ProtobufMessage,
    count_varints,
    decode_varints,
    encode_field,
    encode_message,
    encode_varint,
    signed,
    tags_of,
)
from serving.formats.requests import Answer, Buffer, Encoded, Method, Options, RankAnswer, RankRequest
from serving.formats.schema import (
    CANDIDATE_DENSE,
    CONTEXT_DENSE,
    LENGTHS_SUFFIX,
    MAX_NAME_CHARS,
    MAX_NAMES_SHOWN,
    ORDER,
    SCORES,
    WEIGHTS_SUFFIX,
    RequestSchema,
)
from serving.limits import MAX_ID, RequestLimits
from serving.proto.inference import open_inference_pb2 as inference
from shard_node.bags import Float32Array

BINARY = "application/octet-stream"
HEADER_LENGTH = "inference-header-content-length"
MAX_INPUTS = 16_384
MAX_ASKED_OUTPUTS = 2 + MAX_OUTPUTS
MAX_VERSION_CHARS = 19
_PREFIX, _COUNT = secrets.token_hex(8), itertools.count()


class Parameters(msgspec.Struct, gc=False):
    """The parameters of a request."""

    timeout_ms: int | None = None
    timeout: int | None = None
    top_k: int | None = None
    routing_key: str | None = None
    binary_data_output: bool | None = None
    sequence_id: int | str | None = None


class TensorParameters(msgspec.Struct, gc=False):
    """The parameters of an input or an output."""

    binary_data_size: int | None = None
    binary_data: bool | None = None
    shared_memory_region: str | None = None
    classification: int | None = None

    def check(self, path: str) -> None:
        """Raise InvalidRequestError for what would change the answer."""
        for name in ("shared_memory_region", "classification"):
            if getattr(self, name) not in (None, 0):
                path = f"{path}.parameters.{name}"
                raise InvalidRequestError(path, "it is not supported", kind="unsupported_extension")


class Output(msgspec.Struct, gc=False):
    """An output that is asked for."""

    name: str
    parameters: TensorParameters | None = None


_Parameters = TypeVar("_Parameters", Parameters, TensorParameters)
_NO_PARAMETERS = Parameters()


class InferRequest:
    """One inference request, whose tensors are not read yet. See `Unparsed`. Without `outputs` all are meant."""

    def __init__(
        self,
        model: str,
        version: str,
        request_id: str,
        parameters: Parameters,
        inputs: dict[str, Tensor],
        outputs: list[Output],
    ) -> None:
        if parameters.sequence_id:
            problem = "requests here belong to no sequence"
            raise InvalidRequestError("parameters.sequence_id", problem, kind="unsupported_extension")
        if len(outputs) > MAX_ASKED_OUTPUTS:
            raise limit_exceeded("outputs", "outputs", MAX_ASKED_OUTPUTS, len(outputs), "outputs")
        for one in outputs:
            if one.parameters is not None:
                one.parameters.check("outputs")
        if len({one.name for one in outputs}) != len(outputs):
            raise invalid_field("outputs", "an output is asked for twice")
        self.model = model
        self.version = parse_version(version)
        self.key = parameters.routing_key or request_id
        # Triton's clients send a timeout of 0 for none.
        timeouts = parameters.timeout_ms, parameters.timeout or None
        self._options = Options(*timeouts, parameters.top_k, request_id, parameters.routing_key or "")
        self._is_binary = bool(parameters.binary_data_output)
        self._inputs = inputs
        self._outputs = outputs

    def encode(self, answer: Answer) -> Encoded:
        """See `Unparsed`."""
        raise NotImplementedError

    def _answers(self, answer: Answer) -> Iterator[tuple[Output, str, npt.NDArray[Any]]]:
        """Each output with its datatype and elements, little-endian."""
        ranked = cast(RankAnswer, answer)
        for one in self._outputs or map(Output, (SCORES, ORDER, *ranked.outputs)):
            if one.name == ORDER:
                yield one, "INT64", ranked.order.astype("<i8", copy=False)
            else:
                values = ranked.scores if one.name == SCORES else ranked.outputs[one.name]
                yield one, "FP32", values.astype("<f4", copy=False)

    def parse(self, schema: RequestSchema) -> RankRequest:
        """See `Unparsed`. Raises InvalidRequestError for a model that can't be called by this protocol."""
        given, required, limits = self._inputs, schema.required_inputs, schema.limits
        if not required <= given.keys() <= schema.inputs.keys():
            _check_names(schema, given)
        for one in self._outputs:
            if one.name not in schema.outputs:
                problem = f"there is no output {one.name[:MAX_NAME_CHARS]!r}; there are {list(schema.outputs)}"
                raise invalid_field("outputs", problem)
        has_optional = len(given) > len(required)
        layout = FeatureCounts(schema, schema.keys, input_path)
        ragged, weighted = list[Tensor](), list[tuple[Tensor, int]]()
        for name, is_context, _ in schema.kinds:
            tensor = given[name]
            rows, width = tensor.sizes()
            num_ids = rows * width
            weights = given.get(name + WEIGHTS_SUFFIX) if name in schema.weighted_names else None
            if weights is not None:
                if weights.shape != tensor.shape:
                    raise weights.wrong_shape(f"it must be that of its ids, {tensor.shape}")
                layout.weighted.append(len(layout.num_ids))
                weighted.append((weights, num_ids))
            if is_context:
                if len(tensor.shape) == 2 and rows != 1:
                    raise tensor.wrong_shape("a context feature has [ids] or [1, ids]")
                layout.add(num_ids, 1, num_ids)
            elif has_optional and (lengths := given.get(name + LENGTHS_SUFFIX)) is not None:
                if len(tensor.shape) == 2:
                    raise tensor.wrong_shape(f"with {lengths.name} it must be [ids]")
                ragged.append(lengths)
                layout.add(num_ids, math.prod(lengths.sizes()), RAGGED)
            else:
                layout.add(num_ids, rows, width)
        num_candidates = 0
        if schema.candidate_names:
            num_candidates = layout.num_bags[schema.features.index[schema.candidate_names[0]]]
        elif CANDIDATE_DENSE in given:
            num_candidates = given[CANDIDATE_DENSE].sizes()[0]
        check_num_candidates(limits, num_candidates)
        layout.check(num_candidates)
        num_texts = sum(itertools.compress(layout.num_ids, schema.is_string.tolist()))
        if num_texts > limits.max_string_ids:
            raise limit_exceeded("inputs", "max_string_ids", limits.max_string_ids, num_texts, "string ids")
        ids, texts = list[Buffer](), list[str]()
        for (name, _, is_string), count in zip(schema.kinds, layout.num_ids, strict=True):
            if is_string:
                texts += given[name].texts(count)
            else:
                ids.append(given[name].integers(count))
        ragged_lengths = bytearray().join(tensor.integers(num_candidates) for tensor in ragged)
        weight_buffers = [weights.floats(count) for weights, count in weighted]
        bags = layout.bags(ids, texts, array_of(ragged_lengths, "<i8", "lengths"), weight_buffers)
        kc, kd = schema.num_context_dense, schema.num_candidate_dense
        context = self._dense(CONTEXT_DENSE, (kc,), (1, kc)).reshape(kc)
        candidates = self._dense(CANDIDATE_DENSE, (num_candidates, kd)).reshape(num_candidates, kd)
        return rank_request(schema, bags, num_candidates, context, candidates, self._options, texts)

    def _dense(self, name: str, *allowed: tuple[int, ...]) -> Float32Array:
        tensor = self._inputs.get(name)
        if tensor is None:
            return np.empty(allowed[0], np.float32)
        if tuple(tensor.shape) not in allowed:
            raise tensor.wrong_shape(f"it must be {list(allowed[0])}")
        return array_of(bytearray().join([tensor.floats(math.prod(tensor.shape))]), "<f4", name)


def _check_names(schema: RequestSchema, given: dict[str, Tensor]) -> None:
    """Refuse inputs that the model does not have, and requests without one that it needs."""
    known, model = schema.inputs, schema.features.spec.model
    for name in given:
        if name not in known:
            if len(known) > MAX_NAMES_SHOWN or name in schema.features.index:
                raise schema.unknown_feature("", name)
            raise invalid_field(input_path(name), f"model {model!r} has no such input; it has {list(known)}")
    for name, one in known.items():
        if not one.optional and name not in given:
            raise missing_feature(input_path(name), f"model {model!r} needs it")


def parse_version(text: str) -> int | None:
    """Read a version as the protocol writes it; "" asks for none. Raises InvalidRequestError."""
    if not text:
        return None
    version = int(text) if text.isascii() and text.isdecimal() and len(text) <= MAX_VERSION_CHARS else 0
    if not 1 <= version <= MAX_ID:
        raise invalid_field("version", f"{text[:40]!r} is not an integer in 1..{MAX_ID}")
    return version


def _answer_id(answer: Answer) -> str:
    """Return the request's own id, or 32 hex digits that no other answer has."""
    return answer.request_id or f"{_PREFIX}{next(_COUNT):016x}"


# HTTP


class _Input(msgspec.Struct, gc=False):
    name: str
    shape: list[int]
    datatype: str
    parameters: TensorParameters | None = None
    data: msgspec.Raw | UnsetType = UNSET


class _Body(msgspec.Struct, gc=False, kw_only=True):
    inputs: list[_Input]
    id: str | None = None
    outputs: list[Output] | None = None
    parameters: Parameters | None = None


_ENCODER, _BODY = msgspec.json.Encoder(), msgspec.json.Decoder(_Body)
_BRACE, _BRACKET, _COMMA = (ord(one) for one in "{[,")
# The objects of an input and of its parameters; of an output, of its parameters, and of the request and its own.
_MAX_OBJECTS = 2 * MAX_INPUTS + 2 * MAX_ASKED_OUTPUTS + 2
_NESTED = re.compile(rb"\s*\[\s*\[")
_ELEMENTS: dict[str, Any] = {
    "INT64": Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)],
    "INT32": Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)],
    "FP32": float,
    "BYTES": str,
}
# Of each datatype's elements, flat and nested.
_DECODERS = {
    name: (msgspec.json.Decoder(list[kind]), msgspec.json.Decoder(list[list[kind]]))  # type: ignore[valid-type]
    for name, kind in _ELEMENTS.items()
}


class InferHttpCodec:
    """Reads `POST /v2/models/{model}[/versions/{version}]/infer`; version "" is the live one.

    `header_length` is the header `Inference-Header-Content-Length`, None without it.
    """

    api = "oip_http"
    method: Method = "rank"

    def __init__(self, model: str, version: str, header_length: str | None) -> None:
        self._model = model
        self._version = version
        self._header_length = header_length

    def read(self, body: Buffer, limits: RequestLimits) -> InferRequest:
        """See `Codec`: read the JSON object."""
        view = memoryview(body)
        header = view if self._header_length is None else view[: _header_bytes(self._header_length, len(view))]
        if len(header) > limits.max_json_bytes:
            raise limit_exceeded(
                "", "max_json_bytes", limits.max_json_bytes, len(header), "bytes of JSON", kind="body_too_large"
            )
        if count_above(header, _BRACE, _MAX_OBJECTS):
            problem = f"more than {_MAX_OBJECTS} objects; at most {MAX_INPUTS} inputs are taken"
            raise invalid_field("inputs", problem)
        try:
            decoded = _BODY.decode(header)
        except (msgspec.ValidationError, RecursionError) as error:
            raise invalid_field("", str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise malformed("", f"the request is not JSON: {error}") from None
        return _HttpRequest(
            self._model, self._version, decoded.id or "", decoded.parameters or _NO_PARAMETERS,
            _http_inputs(decoded.inputs, view, len(header)), decoded.outputs or [],
        )  # fmt: skip


class _HttpRequest(InferRequest):
    def encode(self, answer: Answer) -> Encoded:
        """Write JSON, and binary tensors behind it if any were asked for."""
        outputs, tensors = list[dict[str, Any]](), list[bytes]()
        for one, datatype, values in self._answers(answer):
            is_binary = None if one.parameters is None else one.parameters.binary_data
            output: dict[str, Any] = {"name": one.name, "datatype": datatype, "shape": values.shape}
            if self._is_binary if is_binary is None else is_binary:
                tensors.append(values.tobytes())
                output["parameters"] = {"binary_data_size": values.nbytes}
            else:
                output["data"] = values.tolist()
            outputs.append(output)
        document = {"id": _answer_id(answer), "model_name": answer.model, "model_version": str(answer.version)}
        parameters = {"dense_step": cast(RankAnswer, answer).dense_step}
        header = _ENCODER.encode(document | {"parameters": parameters, "outputs": outputs})
        if not tensors:
            return Encoded(header)
        return Encoded(b"".join((header, *tensors)), BINARY, ((HEADER_LENGTH, str(len(header))),))


def _header_bytes(text: str, body_bytes: int) -> int:
    length = int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else -1
    if not 1 <= length <= body_bytes:
        raise invalid_field(HEADER_LENGTH, f"{text[:40]!r} is not in 1..{body_bytes}, the bytes of the body")
    return length


def _http_inputs(decoded: Sequence[_Input], body: memoryview, start: int) -> dict[str, Tensor]:
    """Return inputs by name; their binary data lie behind one another from `start` to the body's end."""
    inputs: dict[str, Tensor] = {}
    total = len(body)
    for one in decoded:
        name, shape, parameters = one.name, one.shape, one.parameters
        size = None
        if parameters is not None:
            size = parameters.binary_data_size
            if parameters.shared_memory_region is not None or parameters.classification:
                parameters.check(input_path(name))
        data: memoryview | Callable[[str, str, int], Any]
        if size is None:
            if isinstance(one.data, UnsetType):
                raise invalid_field(input_path(name), "it has neither data nor parameters.binary_data_size")
            data = partial(_json_elements, one.data, shape)
        else:
            stop = start + size
            if not start <= stop <= total:
                raise invalid_field(
                    f"{input_path(name)}.parameters.binary_data_size",
                    f"{size} is not in 0..{total - start}, the bytes left behind the JSON object",
                )
            data = body[start:stop]
            start = stop
        if name in inputs:
            raise invalid_field(input_path(name), "it is given twice")
        inputs[name] = Tensor(name, one.datatype, shape, data)
    if start != total:
        raise invalid_field("", f"{total - start} bytes are left behind the last input's binary data")
    return inputs


def _json_elements(raw: msgspec.Raw, shape: list[int], path: str, datatype: str, count: int) -> Any:
    """Decode a flat or a nested list; see `Tensor`. What float32 can't hold becomes inf."""
    text, rows = bytes(raw), shape[0] if shape else 0
    # Each element but the first brings a comma, and each list a bracket: more of them prove another number of
    # elements, before any is decoded. In strings they only add to the count.
    if commas := count_above(text, _COMMA, count + rows):
        raise wrong_count(path, count, f"at least {commas - rows}")
    nested = _NESTED.match(text) is not None
    if nested and count_above(text, _BRACKET, rows + 1):
        raise count_mismatch(path, f"its nested data does not have the shape {shape[:8]}")
    try:
        elements: list[Any] = _DECODERS[datatype][nested].decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise invalid_field(path, f"its data is not what its datatype says: {error}") from None
    if nested:
        if [len(elements), *set(map(len, elements))] != shape:
            raise count_mismatch(path, f"its nested data does not have the shape {shape[:8]}")
        elements = list(itertools.chain.from_iterable(elements))
    if len(elements) != count:
        raise wrong_count(path, count, str(len(elements)))
    if datatype == "BYTES":
        return elements
    with np.errstate(over="ignore"):
        return np.fromiter(elements, DTYPES[datatype], count=count).data


# gRPC

_NAME = "inference.ModelInferRequest"
_REQUEST, _CONTENTS = tags_of(inference.ModelInferRequest), tags_of(inference.InferTensorContents)
_TENSOR = tags_of(inference.ModelInferRequest.InferInputTensor)
_OUTPUT = tags_of(inference.ModelInferRequest.InferRequestedOutputTensor)
_PARAMETER = tags_of(inference.InferParameter)
_CONTENTS_OF = {"INT32": "int_contents", "INT64": "int64_contents", "FP32": "fp32_contents", "BYTES": "bytes_contents"}
_NO_DATA = memoryview(b"")
_MAX_SHAPE_DIMS = 8
_INT64_PARAM = inference.InferParameter.INT64_PARAM_FIELD_NUMBER


class InferGrpcCodec:
    """Reads `ModelInferRequest` and writes `ModelInferResponse`, always with raw contents."""

    api = "oip_grpc"
    method: Method = "rank"

    def read(self, body: Buffer, limits: RequestLimits) -> InferRequest:
        """See `Codec`: read a message up to its tensors' elements."""
        message = ProtobufMessage(body, _NAME, limits.max_message_fields)
        texts = {"model_name": "", "model_version": "", "id": ""}
        parameters, inputs = dict[str, object](), dict[str, Tensor]()
        raw, outputs = list[memoryview](), list[Output]()
        for tag, start, end in message.fields():
            name = _REQUEST.get(tag)
            if name == "inputs":
                tensor, own = _described(message, _TENSOR, start, end)
                if own is not None:
                    own.check(input_path(tensor.name))
                if tensor.name in inputs:
                    raise invalid_field(input_path(tensor.name), "it is given twice")
                inputs[tensor.name] = tensor
            elif name == "raw_input_contents":
                raw.append(message.view[start:end])
            elif name == "outputs":
                tensor, own = _described(message, _OUTPUT, start, end)
                outputs.append(Output(tensor.name, own))
            elif name == "parameters":
                parameters |= _parameter(message, start, end)
            elif name is not None:
                texts[name] = message.text(start, end, name)
        if not texts["model_name"]:
            raise invalid_field("model", "it is empty; it must be the name of a served model")
        if raw:
            if len(raw) != len(inputs):
                problem = f"{len(raw)} of them; there must be one for each of {len(inputs)} inputs"
                raise invalid_field("raw_input_contents", problem)
            for tensor, content in zip(inputs.values(), raw, strict=True):
                if tensor.data is not _NO_DATA:
                    path = f"{input_path(tensor.name)}.contents"
                    raise invalid_field(path, "it is given beside raw_input_contents")
                tensor.data = content
        model, version, request_id = texts.values()
        return _GrpcRequest(model, version, request_id, _converted(parameters, Parameters), inputs, outputs)


class _GrpcRequest(InferRequest):
    def encode(self, answer: Answer) -> Encoded:
        """Write a message, whose raw contents are in the order of its outputs."""
        # A number within a `oneof` is written even if it is 0.
        step = encode_varint(_INT64_PARAM << 3) + encode_varint(cast(RankAnswer, answer).dense_step)
        parameters = encode_message(b"dense_step", step)
        texts = answer.model.encode(), str(answer.version).encode(), _answer_id(answer).encode()
        parts = [encode_message(*texts, parameters)]
        raw = []
        for one, datatype, values in self._answers(answer):
            tensor = encode_message(one.name.encode(), datatype.encode(), encode_varint(values.size))
            parts.append(encode_field(5, tensor))
            raw.append(encode_field(6, values.tobytes()))
        return Encoded(b"".join((*parts, *raw)))


def _contents(message: ProtobufMessage, start: int, end: int, path: str, datatype: str, count: int) -> Any:
    """Decode the typed fields of `InferTensorContents`; see `Tensor`. Raw contents are faster."""
    field, chunks = _CONTENTS_OF[datatype], list[Buffer]()
    for tag, at, stop in message.fields(start, end):
        if _CONTENTS.get(tag) == field:
            # A varint by itself has a value, but no end.
            chunks.append(message.view[at:stop] if stop else encode_varint(at))
            if datatype in INTEGERS and chunks[-1] and chunks[-1][-1] > 127:
                raise message.malformed("a packed field that breaks off")
    path = f"{path}.contents"
    if datatype == "BYTES":
        got = len(chunks)
    else:
        numbers = array_of(bytearray().join(chunks), "<f4" if datatype == "FP32" else "<u1", path)
        got = numbers.size if datatype == "FP32" else count_varints(numbers)
    if got != count:
        raise wrong_count(path, count, str(got))
    if datatype == "BYTES":
        return [text_of(path, position, chunk) for position, chunk in enumerate(chunks)]
    return numbers.data if datatype == "FP32" else decode_varints(numbers).astype(DTYPES[datatype]).data


def _described(
    message: ProtobufMessage, tags: dict[int, str], start: int, end: int
) -> tuple[Tensor, TensorParameters | None]:
    """Read an input, without raw contents; or a requested output, which has fewer of the same fields."""
    tensor, parameters = Tensor("", "", [], _NO_DATA), dict[str, object]()
    for tag, at, stop in message.fields(start, end):
        name = tags.get(tag)
        if name == "name":
            tensor.name = message.text(at, stop, "inputs")
        elif name == "datatype":
            tensor.datatype = message.text(at, stop, "inputs")
        elif name == "shape":
            if stop - at > _MAX_SHAPE_DIMS * MAX_VARINT_BYTES or len(tensor.shape) > _MAX_SHAPE_DIMS:
                raise tensor.wrong_shape("more dimensions than any tensor here has")
            tensor.shape += message.varints(at, stop) if stop else (signed(at),)
        elif name == "contents":
            if tensor.data is not _NO_DATA:
                raise malformed(f"{input_path(tensor.name)}.contents", "it is there twice")
            tensor.data = partial(_contents, message, at, stop)
        elif name == "parameters":
            parameters |= _parameter(message, at, stop)
    return tensor, _converted(parameters, TensorParameters) if parameters else None


def _parameter(message: ProtobufMessage, start: int, end: int) -> dict[str, object]:
    """Read an entry of a map of parameters."""
    name, (first, last) = message.entry(start, end, "parameters")
    value: object = None
    for tag, at, stop in message.fields(first, last):
        kind = _PARAMETER.get(tag)
        if kind == "string_param":
            value = message.text(at, stop, "parameters")
        elif kind == "double_param":
            value = unpack_from("<d", message.data, at)[0]
        elif kind is not None:
            value = {"bool_param": bool(at), "int64_param": signed(at)}.get(kind, at)
    return {name: value}


def _converted(parameters: dict[str, object], kind: type[_Parameters]) -> _Parameters:
    try:
        return msgspec.convert(parameters, kind)
    except msgspec.ValidationError as error:
        raise invalid_field("parameters", str(error)) from None
