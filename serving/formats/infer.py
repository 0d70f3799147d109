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
from collections.abc import Sequence
from operator import attrgetter
from typing import Annotated, Any, Self, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError
from msgspec import UNSET, UnsetType

from loader.errors import NOT_DECODED
from loader.snapshot.manifest import MAX_OUTPUTS
from serving import errors
from serving.errors import InvalidRequestError, count_mismatch, invalid_field, limit_exceeded, malformed
from serving.formats import protobuf, requests
from serving.formats.json_reader import count_above
from serving.formats.requests import Buffer, Encoded, Response, check_options, text_of
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
from serving.results import RankResult
from shard_node.bags import Float32Array

BINARY = "application/octet-stream"
HEADER_LENGTH = "inference-header-content-length"
MAX_INPUTS = 16_384
MAX_CHOSEN_OUTPUTS = 2 + MAX_OUTPUTS
MAX_VERSION_CHARS = 19
_PREFIX, _COUNT = secrets.token_hex(8), itertools.count()


class Parameters(msgspec.Struct, gc=False):
    """The parameters of a request."""

    timeout_ms: int | None = None
    timeout: int | None = None
    top_k: int | None = None
    max_age_ms: int | None = None
    min_sequence: int | None = None
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
    """An output that the response is to have."""

    name: str
    parameters: TensorParameters | None = None


class Tensor(msgspec.Struct):
    """An input, as the client describes it.

    Its data are raw: little-endian, row-major, a string a 4-byte length and its bytes; or what a codec has to decode.
    """

    name: str
    shape: list[int]
    datatype: str
    parameters: TensorParameters | None = None
    data: msgspec.Raw | UnsetType = UNSET

    def wrong_shape(self, allowed: str) -> InvalidRequestError:
        """Make the error for a shape."""
        return count_mismatch(f"{_path(self.name)}.shape", f"{self.shape[:8]}; {allowed}")


_Parameters = TypeVar("_Parameters", Parameters, TensorParameters)
_ORIGIN = ("dense_step", "delta_sequence", "age_ms")  # parameters of a response: which weights and rows gave it
_DTYPES = {"INT64": "<i8", "INT32": "<i4", "FP32": "<f4"}


class InferCodec(requests.Codec, eq=False):
    """The protocol's form of rank requests. Without `outputs` all are meant."""

    inputs: dict[str, Tensor] = {}  # noqa: RUF012
    outputs: list[Output] = []  # noqa: RUF012
    is_binary: bool = False

    def _of_request(
        self,
        limits: RequestLimits,
        names: tuple[str, str, str],
        parameters: Parameters,
        inputs: dict[str, Tensor],
        outputs: list[Output],
    ) -> Self:
        if parameters.sequence_id:
            problem = "requests here belong to no sequence"
            raise InvalidRequestError("parameters.sequence_id", problem, kind="unsupported_extension")
        if len(outputs) > MAX_CHOSEN_OUTPUTS:
            raise limit_exceeded("outputs", "outputs", MAX_CHOSEN_OUTPUTS, len(outputs), "outputs")
        for output in outputs:
            if output.parameters is not None:
                output.parameters.check("outputs")
        if len(set(map(attrgetter("name"), outputs))) != len(outputs):
            raise invalid_field("outputs", "an output is asked for twice")
        model, version, request_id = names
        routing_key, top_k = parameters.routing_key or "", parameters.top_k
        # Triton's clients send a timeout of 0 for none.
        timeout_ms, timeout_us = parameters.timeout_ms, parameters.timeout or None
        bounds = parameters.max_age_ms, parameters.min_sequence
        timeout_s, bound = check_options(limits, request_id, routing_key, top_k, timeout_ms, bounds, timeout_us)
        return type(self)(
            self.method, model, self.api, parse_version(version), routing_key or request_id, timeout_s, top_k,
            request_id, bound, False, inputs, outputs, bool(parameters.binary_data_output),
        )  # fmt: skip

    def parse(self, schema: RequestSchema) -> requests.RankRequest:
        """See `Codec`. Raises InvalidRequestError for a model that can't be called by this protocol."""
        given, required, limits = self.inputs, schema.required_inputs, schema.limits
        if not required <= given.keys() <= schema.inputs.keys():
            _check_names(schema, given)
        for output in self.outputs:
            if output.name not in schema.outputs:
                problem = f"there is no output {output.name[:MAX_NAME_CHARS]!r}; there are {list(schema.outputs)}"
                raise invalid_field("outputs", problem)
        # Of each tensor its rows, and the elements of each.
        sizes = dict[str, tuple[int, int]]()
        for name, tensor in given.items():
            rows, *widths = tensor.shape or (-1,)
            width = 1 if not widths else widths[0] if len(widths) == 1 else -1
            if not (0 <= rows <= MAX_ID and 0 <= width <= MAX_ID):
                raise tensor.wrong_shape("it must have one or two dimensions, each 0 or more")
            sizes[name] = rows, width
        num_ids, num_bags, widths, weighted = list[int](), list[int](), list[int](), list[int]()
        ids, strings = list[tuple[Tensor, int]](), list[tuple[Tensor, int]]()
        ragged, weights = list[tuple[Tensor, int]](), list[tuple[Tensor, int]]()
        num_texts = 0
        for position, (name, is_context, is_string) in enumerate(schema.kinds):
            tensor, (rows, width) = given[name], sizes[name]
            count = rows * width
            (strings if is_string else ids).append((tensor, count))
            num_texts += count * is_string
            num_ids.append(count)
            if name in schema.weighted_names and (factors := given.get(name + WEIGHTS_SUFFIX)) is not None:
                if factors.shape != tensor.shape:
                    raise factors.wrong_shape(f"it must be that of its ids, {tensor.shape}")
                weighted.append(position)
                weights.append((factors, count))
            if is_context:
                if len(tensor.shape) == 2 and rows != 1:
                    raise tensor.wrong_shape("a context feature has [ids] or [1, ids]")
                rows, width = 1, count
            elif (lengths := given.get(name + LENGTHS_SUFFIX)) is not None:
                if len(tensor.shape) == 2:
                    raise tensor.wrong_shape(f"with {lengths.name} it must be [ids]")
                rows, width = math.prod(sizes[lengths.name]), requests.RAGGED
                ragged.append((lengths, rows))
            num_bags.append(rows)
            widths.append(width)
        num_candidates = sizes.get(CANDIDATE_DENSE, (0, 0))[0]
        if schema.candidate_names:
            num_candidates = num_bags[schema.features.index[schema.candidate_names[0]]]
        schema.check_num_candidates(num_candidates)
        counts = requests.FeatureCounts(schema.keys, num_ids, num_bags, widths, weighted)
        counts.check(schema, num_candidates, _path)
        if num_texts > limits.max_string_ids:
            raise limit_exceeded("inputs", "max_string_ids", limits.max_string_ids, num_texts, "string ids")
        texts = list[str]()
        for tensor, count in strings:
            texts += self._elements(tensor, count, ("BYTES",))
        flat_lengths, integers = self._numbers(ragged, "INT64"), self._numbers(ids, "INT64")
        flat_weights = self._numbers(weights, "FP32") if weights else None
        bags = counts.bags(schema, flat_lengths, integers, texts, flat_weights)
        context, candidates = self._dense(schema, num_candidates)
        return self.rank_request(bags, num_candidates, context, candidates, texts)

    def _dense(self, schema: RequestSchema, num_candidates: int) -> list[Float32Array]:
        """float32 [Kc] and [N, Kd]."""
        kc, kd = schema.num_context_dense, schema.num_candidate_dense
        arrays = []
        for name, allowed in ((CONTEXT_DENSE, ([kc], [1, kc])), (CANDIDATE_DENSE, ([num_candidates, kd],))):
            tensors = list[tuple[Tensor, int]]()
            if (tensor := self.inputs.get(name)) is not None:
                if tensor.shape not in allowed:
                    raise tensor.wrong_shape(f"it must be {allowed[0]}")
                tensors.append((tensor, math.prod(tensor.shape)))
            arrays.append(self._numbers(tensors, "FP32").reshape(allowed[0]))
        return arrays

    def _numbers(self, tensors: Sequence[tuple[Tensor, int]], datatype: str) -> Any:
        """Return the elements of some tensors, with the count of each, as one flat array of INT64 or FP32."""
        buffers, dtype = [], np.dtype(_DTYPES[datatype])
        for tensor, count in tensors:
            data: Any = tensor.data
            if type(data) is not memoryview or tensor.datatype != datatype or len(data) != count * dtype.itemsize:
                data = self._elements(tensor, count, ("INT64", "INT32") if datatype == "INT64" else ("FP32",))
                if tensor.datatype == "INT32":
                    data = np.frombuffer(data, "<i4").astype("<i8").data
            buffers.append(data)
        return np.frombuffer(bytearray().join(buffers), dtype)

    def _elements(self, tensor: Tensor, count: int, allowed: tuple[str, ...]) -> Any:
        """Return as many elements: a buffer of numbers, which may be NaN and inf, or a list of strings."""
        datatype, path = tensor.datatype, _path(tensor.name)
        data: Any = tensor.data
        if datatype not in allowed:
            kind = "invalid_field" if allowed == ("FP32",) else "invalid_id"
            problem = f"{datatype[:16]!r}; it must be {' or '.join(allowed)}"
            raise InvalidRequestError(f"{path}.datatype", problem, kind=kind)
        if not isinstance(data, memoryview):
            return self._decoded(tensor, count, path)
        if datatype != "BYTES":
            if len(data) != (size := count * np.dtype(_DTYPES[datatype]).itemsize):
                holds = f"{count} elements of {datatype}, {size} bytes"
                raise count_mismatch(path, f"{len(data)} bytes of data; its shape holds {holds}")
            return data
        start, texts = 0, list[str]()
        while start < len(data) and len(texts) <= count:
            first = start + 4
            start = first + int.from_bytes(data[start:first], "little")
            if start > len(data):
                raise malformed(path, f"BYTES element {len(texts)} is longer than what is left")
            texts.append(text_of(path, len(texts), data[first:start]))
        if len(texts) != count:
            raise _wrong_count(path, count, f"{len(texts)}" if len(texts) < count else f"at least {len(texts)}")
        return texts

    def _decoded(self, tensor: Tensor, count: int, path: str) -> Any:
        """Return elements that are not raw, as `_elements` does."""
        raise NotImplementedError

    def _outputs(self, response: Response) -> list[tuple[Output, str, npt.NDArray[Any]]]:
        ranked, outputs = cast(RankResult, response), []
        for output in self.outputs or [Output(name) for name in (SCORES, ORDER, *ranked.outputs)]:
            if output.name == ORDER:
                outputs.append((output, "INT64", ranked.order.astype("<i8", copy=False)))
            else:
                values = ranked.scores if output.name == SCORES else ranked.outputs[output.name]
                outputs.append((output, "FP32", values.astype("<f4", copy=False)))
        return outputs


def _path(name: str) -> str:
    return f"inputs.{name[:MAX_NAME_CHARS]}"


def _wrong_count(path: str, count: int, actual: str) -> InvalidRequestError:
    return count_mismatch(path, f"its shape holds {count} elements, its data {actual}")


def _check_names(schema: RequestSchema, given: dict[str, Tensor]) -> None:
    known, model = schema.inputs, schema.features.spec.model
    for name in given:
        if name not in known:
            if len(known) > MAX_NAMES_SHOWN or name in schema.features.index:
                raise schema.unknown_feature("", name)
            raise invalid_field(_path(name), f"model {model!r} has no such input; it has {list(known)}")
    for name, spec in known.items():
        if not spec.optional and name not in given:
            raise errors.missing_feature(_path(name), f"model {model!r} needs it")


def parse_version(text: str) -> int | None:
    """Read a version as the protocol writes it; "" asks for none. Raises InvalidRequestError."""
    if not text:
        return None
    version = int(text) if text.isascii() and text.isdecimal() and len(text) <= MAX_VERSION_CHARS else 0
    if not 1 <= version <= MAX_ID:
        raise invalid_field("version", f"{text[:40]!r} is not an integer in 1..{MAX_ID}")
    return version


def _response_id(response: Response) -> str:
    """Return the request's id, or 32 hex digits that no other response has."""
    return response.request_id or f"{_PREFIX}{next(_COUNT):016x}"


class _Body(msgspec.Struct, gc=False, kw_only=True):
    inputs: list[Tensor]
    id: str | None = None
    outputs: list[Output] | None = None
    parameters: Parameters | None = None


_ENCODER, _BODY = msgspec.json.Encoder(), msgspec.json.Decoder(_Body)
_BRACE, _BRACKET, _COMMA = b"{[,"
# The objects of an input and of its parameters; of an output, of its parameters, and of the request and its parameters.
_MAX_OBJECTS = 2 * MAX_INPUTS + 2 * MAX_CHOSEN_OUTPUTS + 2
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


class InferHttpCodec(InferCodec, eq=False):
    """The form of `POST /v2/models/{model}[/versions/{version_name}]/infer`; version "" is the live one.

    `header_length` is the header `Inference-Header-Content-Length`, None without it.
    """

    api: str = "oip_http"
    version_name: str = ""
    header_length: str | None = None

    def read(self, body: Buffer, limits: RequestLimits) -> Self:
        """See `Codec`: read the JSON object, and where the binary data behind it are."""
        view = memoryview(body)
        total = start = len(view)
        if (text := self.header_length) is not None:
            start = int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else -1
            if not 1 <= start <= total:
                raise invalid_field(HEADER_LENGTH, f"{text[:40]!r} is not in 1..{total}, the bytes of the body")
        if start > (allowed := limits.max_json_bytes):
            raise limit_exceeded("", "max_json_bytes", allowed, start, "bytes of JSON", kind="body_too_large")
        header = view[:start]
        if count_above(header, _BRACE, _MAX_OBJECTS):
            raise invalid_field("inputs", f"more than {_MAX_OBJECTS} objects; at most {MAX_INPUTS} inputs are taken")
        try:
            decoded = _BODY.decode(header)
        except (msgspec.ValidationError, RecursionError) as error:
            raise invalid_field("", str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise malformed("", f"the request is not JSON: {error}") from None
        inputs: dict[str, Tensor] = {}
        for tensor in decoded.inputs:
            name, parameters, size = tensor.name, tensor.parameters, None
            if parameters is not None:
                size = parameters.binary_data_size
                if parameters.shared_memory_region is not None or parameters.classification:
                    parameters.check(_path(name))
            if size is not None:
                stop = start + size
                if not start <= stop <= total:
                    raise invalid_field(
                        f"{_path(name)}.parameters.binary_data_size",
                        f"{size} is not in 0..{total - start}, the bytes left behind the JSON object",
                    )
                tensor.data = cast(Any, view[start:stop])
                start = stop
            elif isinstance(tensor.data, UnsetType):
                raise invalid_field(_path(name), "it has neither data nor parameters.binary_data_size")
            if name in inputs:
                raise invalid_field(_path(name), "it is given twice")
            inputs[name] = tensor
        if start != total:
            raise invalid_field("", f"{total - start} bytes are left behind the last input's binary data")
        names = self.model, self.version_name, decoded.id or ""
        return self._of_request(limits, names, decoded.parameters or Parameters(), inputs, decoded.outputs or [])

    def encode(self, response: Response) -> Encoded:
        """Write JSON, and the binary tensors that were asked for behind it."""
        outputs, tensors = list[dict[str, Any]](), list[bytes]()
        for output, datatype, values in self._outputs(response):
            is_binary = None if output.parameters is None else output.parameters.binary_data
            described: dict[str, Any] = {"name": output.name, "datatype": datatype, "shape": values.shape}
            if self.is_binary if is_binary is None else is_binary:
                tensors.append(values.tobytes())
                described["parameters"] = {"binary_data_size": values.nbytes}
            else:
                described["data"] = values.tolist()
            outputs.append(described)
        header = _ENCODER.encode({
            "id": _response_id(response),
            "model_name": response.model,
            "model_version": str(response.version),
            "parameters": {name: getattr(response, name) for name in _ORIGIN},
            "outputs": outputs,
        })  # fmt: skip
        if not tensors:
            return Encoded(header)
        return Encoded(b"".join((header, *tensors)), BINARY, ((HEADER_LENGTH, str(len(header))),))

    def _decoded(self, tensor: Tensor, count: int, path: str) -> Any:
        """Decode a flat or a nested list. What float32 can't hold becomes inf."""
        text, shape, datatype = bytes(cast(msgspec.Raw, tensor.data)), tensor.shape, tensor.datatype
        # Each element but the first brings a comma, and each list a bracket: more of them prove another number of
        # elements, before any is decoded. In strings they only add to the count.
        if commas := count_above(text, _COMMA, count + shape[0]):
            raise _wrong_count(path, count, f"at least {commas - shape[0]}")
        nested = _NESTED.match(text) is not None
        if nested and count_above(text, _BRACKET, shape[0] + 1):
            raise count_mismatch(path, f"its nested data does not have the shape {shape[:8]}")
        try:
            elements: list[Any] = _DECODERS[datatype][nested].decode(text)
        except NOT_DECODED as error:
            raise invalid_field(path, f"its data is not what its datatype says: {error}") from None
        if nested:
            if [len(elements), *set(map(len, elements))] != shape:
                raise count_mismatch(path, f"its nested data does not have the shape {shape[:8]}")
            elements = list(itertools.chain.from_iterable(elements))
        if len(elements) != count:
            raise _wrong_count(path, count, str(len(elements)))
        if datatype == "BYTES":
            return elements
        with np.errstate(over="ignore"):
            return np.fromiter(elements, _DTYPES[datatype], count=count).data


_NAME = "inference.ModelInferRequest"
_REQUEST, _CONTENTS = protobuf.tags_of(inference.ModelInferRequest), protobuf.tags_of(inference.InferTensorContents)
_TENSOR = protobuf.tags_of(inference.ModelInferRequest.InferInputTensor)
_OUTPUT = protobuf.tags_of(inference.ModelInferRequest.InferRequestedOutputTensor)
_CONTENTS_OF = {"INT32": "int_contents", "INT64": "int64_contents", "FP32": "fp32_contents"}
_NO_DATA: Any = memoryview(b"")
_MAX_SHAPE_DIMS = 8


class InferGrpcCodec(InferCodec, eq=False):
    """`ModelInferRequest` and `ModelInferResponse`, always with raw contents."""

    api: str = "oip_grpc"

    def read(self, body: Buffer, limits: RequestLimits) -> Self:
        """See `Codec`: read a message up to its tensors' elements."""
        message = protobuf.ProtobufMessage(body, _NAME, limits.max_message_fields)
        texts = {"model_name": "", "model_version": "", "id": ""}
        parameters, inputs = dict[str, object](), dict[str, Tensor]()
        raw, outputs = list[memoryview](), list[Output]()
        for tag, start, end in message.fields():
            name = _REQUEST.get(tag)
            if name == "inputs":
                tensor = _described(message, _TENSOR, start, end)
                if tensor.parameters is not None:
                    tensor.parameters.check(_path(tensor.name))
                if tensor.name in inputs:
                    raise invalid_field(_path(tensor.name), "it is given twice")
                inputs[tensor.name] = tensor
            elif name == "raw_input_contents":
                raw.append(message.view[start:end])
            elif name == "outputs":
                tensor = _described(message, _OUTPUT, start, end)
                outputs.append(Output(tensor.name, tensor.parameters))
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
                    raise invalid_field(f"{_path(tensor.name)}.contents", "it is given beside raw_input_contents")
                tensor.data = cast(Any, content)
        names = cast("tuple[str, str, str]", tuple(texts.values()))
        return self._of_request(limits, names, _converted(parameters, Parameters), inputs, outputs)

    def encode(self, response: Response) -> Encoded:
        """Write a message, whose raw contents are in the order of its outputs."""
        outputs = self._outputs(response)
        origin = {name: inference.InferParameter(int64_param=getattr(response, name)) for name in _ORIGIN}
        message = inference.ModelInferResponse(
            model_name=response.model,
            model_version=str(response.version),
            id=_response_id(response),
            parameters=origin,
            outputs=[
                inference.ModelInferResponse.InferOutputTensor(name=output.name, datatype=datatype, shape=values.shape)
                for output, datatype, values in outputs
            ],
            raw_output_contents=[values.tobytes() for _, _, values in outputs],
        )
        return Encoded(message.SerializeToString())

    def _decoded(self, tensor: Tensor, count: int, path: str) -> Any:
        """Decode the typed fields of `InferTensorContents`. Raw contents are faster."""
        datatype, path = tensor.datatype, f"{path}.contents"
        message, start, end = cast(Any, tensor.data)
        if datatype == "BYTES":
            fields = message.fields(start, end)
            texts = [message.view[at:stop] for tag, at, stop in fields if _CONTENTS.get(tag) == "bytes_contents"]
            if len(texts) != count:
                raise _wrong_count(path, count, str(len(texts)))
            return [text_of(path, position, text) for position, text in enumerate(texts)]
        # Before any is decoded: an element has at most a tag and a varint's bytes. What is unknown gets a kilobyte.
        if end - start > 1024 + count * (1 + protobuf.MAX_VARINT_BYTES):
            raise _wrong_count(path, count, f"has {end - start} bytes")
        try:
            contents = inference.InferTensorContents.FromString(message.view[start:end])
        except DecodeError as error:
            raise malformed(path, f"it is no InferTensorContents: {error}") from None
        elements = getattr(contents, _CONTENTS_OF[datatype])
        if len(elements) != count:
            raise _wrong_count(path, count, str(len(elements)))
        return np.fromiter(elements, _DTYPES[datatype], count).data


def _described(message: protobuf.ProtobufMessage, tags: dict[int, str], start: int, end: int) -> Tensor:
    """Read an input, without raw contents; or an output of the response, which has fewer of the same fields."""
    tensor, parameters = Tensor("", [], "", data=_NO_DATA), dict[str, object]()
    for tag, at, stop in message.fields(start, end):
        name = tags.get(tag)
        if name == "name":
            tensor.name = message.text(at, stop, "inputs")
        elif name == "datatype":
            tensor.datatype = message.text(at, stop, "inputs")
        elif name == "shape":
            if stop - at > _MAX_SHAPE_DIMS * protobuf.MAX_VARINT_BYTES or len(tensor.shape) > _MAX_SHAPE_DIMS:
                raise tensor.wrong_shape("more dimensions than any tensor here has")
            tensor.shape += map(protobuf.signed, message.varints(at, stop) if stop else (at,))
        elif name == "contents":
            if tensor.data is not _NO_DATA:
                raise malformed(f"{_path(tensor.name)}.contents", "it is there twice")
            tensor.data = cast(Any, (message, at, stop))
        elif name == "parameters":
            parameters |= _parameter(message, at, stop)
    if parameters:
        tensor.parameters = _converted(parameters, TensorParameters)
    return tensor


def _parameter(message: protobuf.ProtobufMessage, start: int, end: int) -> dict[str, object]:
    name, (first, last) = message.entry(start, end, "parameters")
    try:
        parameter = inference.InferParameter.FromString(bytes(message.view[first:last]))
    except DecodeError as error:
        raise malformed("parameters", f"{name[:80]!r} is no InferParameter: {error}") from None
    kind = parameter.WhichOneof("parameter_choice")
    return {name: kind and getattr(parameter, kind)}


def _converted(parameters: dict[str, object], kind: type[_Parameters]) -> _Parameters:
    try:
        return msgspec.convert(parameters, kind)
    except msgspec.ValidationError as error:
        raise invalid_field("parameters", str(error)) from None
