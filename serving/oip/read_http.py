"""The HTTP form of an inference request: a JSON object, and behind it the binary tensors.

Source: https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/protocol/extension_binary_data.html
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from serving.errors import InvalidFieldError, MalformedRequestError
from serving.json_size import JsonSize
from serving.limits import RequestLimits
from serving.oip.errors import UnsupportedExtensionError
from serving.oip.infer_request import Buffer, InferInputs, InferRequest, InputTensor, RequestedOutput, input_path
from serving.oip.json_data import JsonData
from serving.oip.raw_data import RawData

MAX_INPUTS = 16_384
# What describes more inputs than most models have is decoded each time.
MAX_FORM_BYTES = 256 * 2**10
# No JSON object within this limit has more keys. Entries of lists are elements, counted once the model is known.
_MAX_KEYS = 16 * MAX_INPUTS
_MANY = 2**62
# Objects that binary tensors follow, as long as those of some 300 inputs at most.
_KEPT_HEADERS, _KEPT_HEADER_BYTES = 128, 32 * 2**10


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


class _Header(msgspec.Struct, gc=False, kw_only=True):
    inputs: msgspec.Raw
    id: str | None = None
    outputs: list[_Output] | None = None
    parameters: _Parameters | None = None


class _HeaderInputs(msgspec.Struct, gc=False):
    inputs: list[_Input]


_BODY = msgspec.json.Decoder(_Body)
_HEADER = msgspec.json.Decoder(_Header)
_HEADER_INPUTS = msgspec.json.Decoder(_HeaderInputs)
_NO_PARAMETERS = _Parameters()


class _Said(NamedTuple):
    """What a request's object says. Shared by requests that say the same, and not to be changed.

    Attributes:
        decoded: the object.
        parameters: of it.
        outputs: those asked for; None for all.
        header: its text, if binary tensors follow it.
        inputs: the text of its inputs, likewise.
    """

    decoded: _Body | _Header
    parameters: _Parameters
    outputs: tuple[RequestedOutput, ...] | None
    header: bytes
    inputs: bytes


def read_infer(
    model: str, version: int | None, body: Buffer, header_length: int | None, limits: RequestLimits
) -> InferRequest:
    """Reads a request.

    Args:
        model: from the path.
        version: from the path.
        body: all of it, not compressed. What can be written to is nobody else's from here on.
        header_length: bytes of the JSON object; None if that is the whole body.
        limits: of the process.

    Raises:
        MalformedRequestError: if it is no such JSON object.
        InvalidFieldError: for a value that can't be, or binary data that don't fill the body.
        UnsupportedExtensionError: for a part of the protocol's extensions that is not spoken here.
    """
    view = memoryview(body)
    header = view if header_length is None else view[:header_length]
    # Nothing shorter has as many keys: the shortest takes more than four bytes.
    if len(header) > 4 * _MAX_KEYS:
        JsonSize(entries=_MANY, keys=_MAX_KEYS, limits=limits).check_keys(bytes(header))
    if len(header) < len(view):
        text = bytes(header)
        said = _known_header(text) if len(text) <= _KEPT_HEADER_BYTES else _read_header(text)
        inputs = _inputs_behind(said, view[len(header) :])
    else:
        body_said = _decode(_BODY, header)
        said = _said(body_said, b"", b"")
        inputs = InferInputs(partial(_tensors, body_said.inputs, view[len(header) :]))
    decoded, parameters = said.decoded, said.parameters
    return InferRequest(
        model=model,
        version=version,
        id=decoded.id or "",
        inputs=inputs,
        outputs=said.outputs,
        binary_output=bool(parameters.binary_data_output),
        timeout_ms=parameters.timeout_ms,
        timeout_us=parameters.timeout,
        top_k=parameters.top_k,
        routing_key=parameters.routing_key or "",
    )


def parse_header_length(text: str | None, body_bytes: int) -> int | None:
    """The value of `Inference-Header-Content-Length`; None without one.

    Raises:
        InvalidFieldError: if it is no number of bytes that the body has.
    """
    if text is None:
        return None
    length = int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else -1
    if not 1 <= length <= body_bytes:
        problem = f"{text[:40]!r} is not in 1..{body_bytes}, the bytes of the body"
        raise InvalidFieldError("inference-header-content-length", problem)
    return length


def _decode(decoder: msgspec.json.Decoder[Any], header: bytes | memoryview) -> Any:
    try:
        return decoder.decode(header)
    except (msgspec.ValidationError, RecursionError) as error:
        raise InvalidFieldError("", str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedRequestError("", f"the request is not JSON: {error}") from error


def _said(decoded: _Body | _Header, header: bytes, inputs: bytes) -> _Said:
    parameters = decoded.parameters or _NO_PARAMETERS
    if parameters.sequence_id:
        raise UnsupportedExtensionError("parameters.sequence_id", "requests here belong to no sequence")
    # An empty list is what clients send that don't choose.
    outputs = tuple(_output(one) for one in decoded.outputs) if decoded.outputs else None
    return _Said(decoded, parameters, outputs, header, inputs)


def _read_header(header: bytes) -> _Said:
    """Reads an object that binary tensors follow."""
    decoded = _decode(_HEADER, header)
    return _said(decoded, header, bytes(decoded.inputs))


# Many clients say the same of each request, but for its binary tensors.
_known_header = lru_cache(_KEPT_HEADERS)(_read_header)


def _inputs_behind(said: _Said, binary: memoryview) -> InferInputs:
    read, form = partial(_read_inputs, said.header, binary), said.inputs
    if len(form) > MAX_FORM_BYTES:
        return InferInputs(read)
    # As it is written: the same bytes say the same.
    return InferInputs(read, form, len(form), binary, is_own=not binary.readonly)


def _read_inputs(header: bytes, binary: memoryview) -> list[InputTensor]:
    return _tensors(_decode(_HEADER_INPUTS, header).inputs, binary)


def _tensors(decoded: Sequence[_Input], binary: memoryview) -> list[InputTensor]:
    if len(decoded) > MAX_INPUTS:
        raise InvalidFieldError("inputs", f"{len(decoded)} inputs; at most {MAX_INPUTS} are taken")
    tensors, start = [], 0
    for one in decoded:
        size = None
        if one.parameters is not None:
            if one.parameters.shared_memory_region is not None:
                raise UnsupportedExtensionError(
                    f"{input_path(one.name)}.parameters.shared_memory_region", "shared memory is not taken"
                )
            size = one.parameters.binary_data_size
        if size is None:
            if isinstance(one.data, UnsetType):
                raise InvalidFieldError(input_path(one.name), "it has neither data nor parameters.binary_data_size")
            tensors.append(InputTensor(one.name, one.datatype, one.shape, JsonData(one.data, one.shape)))
            continue
        if not 0 <= size <= len(binary) - start:
            left = len(binary) - start
            raise InvalidFieldError(
                f"{input_path(one.name)}.parameters.binary_data_size",
                f"{size} is not in 0..{left}, the bytes left behind the JSON object",
            )
        tensors.append(InputTensor(one.name, one.datatype, one.shape, RawData(binary[start : start + size])))
        start += size
    if start != len(binary):
        raise InvalidFieldError("", f"{len(binary) - start} bytes are left behind the last input's binary data")
    return tensors


def _output(decoded: _Output) -> RequestedOutput:
    parameters = decoded.parameters
    if parameters is None:
        return RequestedOutput(decoded.name)
    for extension in ("classification", "shared_memory_region"):
        if getattr(parameters, extension):
            raise UnsupportedExtensionError(f"outputs.parameters.{extension}", "it is not spoken here")
    return RequestedOutput(decoded.name, parameters.binary_data)
