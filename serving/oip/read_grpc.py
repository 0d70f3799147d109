"""The gRPC form of an inference request: `ModelInferRequest`.

It is read with the types of `infer_wire.proto`, which leave its inputs undecoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from serving.errors import InvalidFieldError, MalformedRequestError
from serving.oip.contents_data import ContentsData
from serving.oip.errors import UnsupportedExtensionError
from serving.oip.infer_request import InferInputs, InferRequest, InputTensor, RequestedOutput, input_path, parse_version
from serving.oip.raw_data import RawData
from serving.oip.read_http import MAX_FORM_BYTES, MAX_INPUTS
from serving.parse_proto import check_model
from serving.proto.inference.open_inference_pb2 import InferParameter, ModelInferRequest
from serving.proto.shardrank.v1 import infer_wire_pb2

Read = TypeVar("Read", bound=Message)
# Of the objects that a form holds for each input, beside its bytes.
_INPUT_BYTES = 88
_INTEGERS = ("int64_param", "uint64_param")


def read_message(data: bytes, message_type: type[Read]) -> Read:
    """Decodes a message. Raises MalformedRequestError."""
    return _decoded(data, message_type, message_type)


def read_infer(data: bytes) -> InferRequest:
    """Reads a request.

    Raises:
        MalformedRequestError: if it is no such message.
        InvalidFieldError: for a value that can't be.
        UnsupportedExtensionError: for a part of the protocol's extensions that is not spoken here.
    """
    message = _decoded(data, infer_wire_pb2.ModelInferRequest, ModelInferRequest)
    check_model(message.model_name)
    parameters = message.parameters
    if "sequence_id" in parameters and getattr(
        parameters["sequence_id"], parameters["sequence_id"].WhichOneof("parameter_choice") or "int64_param"
    ):
        raise UnsupportedExtensionError("parameters.sequence_id", "requests here belong to no sequence")
    return InferRequest(
        model=message.model_name,
        version=parse_version(message.model_version),
        id=message.id,
        inputs=_inputs(data, message.inputs[:], message.raw_input_contents[:]),
        outputs=[_output(one) for one in message.outputs] or None,
        binary_output=True,
        timeout_ms=_integer(parameters, "timeout_ms"),
        timeout_us=_integer(parameters, "timeout"),
        top_k=_integer(parameters, "top_k"),
        routing_key=_text(parameters, "routing_key"),
    )


def _decoded(data: bytes, message_type: type[Read], public: type[Message]) -> Read:
    try:
        return message_type.FromString(data)
    except DecodeError as error:
        # The decoder names the type that it read, which may be no part of the public API.
        name = public.DESCRIPTOR.full_name
        reason = str(error).replace(message_type.DESCRIPTOR.full_name, name)
        raise MalformedRequestError("", f"the message is not a {name}: {reason}") from error


def _inputs(data: bytes, encoded: Sequence[bytes], raw: Sequence[bytes]) -> InferInputs:
    if len(encoded) > MAX_INPUTS:
        raise InvalidFieldError("inputs", f"{len(encoded)} inputs; at most {MAX_INPUTS} are taken")
    if raw and len(raw) != len(encoded):
        raise InvalidFieldError(
            "raw_input_contents", f"{len(raw)} of them; there must be one for each of {len(encoded)} inputs"
        )
    read = partial(_read_inputs, data, raw)
    size = sum(map(len, encoded))
    if not raw or size > MAX_FORM_BYTES:
        return InferInputs(read)
    # As they are encoded: the same bytes say the same.
    form = (tuple(encoded), tuple(map(len, raw)))
    form_bytes = size + _INPUT_BYTES * len(encoded)
    return InferInputs(read, form, form_bytes, bytearray().join(raw), is_own=True)


def _read_inputs(data: bytes, raw: Sequence[bytes]) -> list[InputTensor]:
    tensors = []
    for number, one in enumerate(read_message(data, ModelInferRequest).inputs):
        name = one.name
        if one.parameters:
            _refuse(one.parameters, f"{input_path(name)}.parameters", "shared_memory_region")
        if raw and one.HasField("contents"):
            raise InvalidFieldError(f"{input_path(name)}.contents", "it is given beside raw_input_contents")
        contents = RawData(raw[number]) if raw else ContentsData(one.contents)
        tensors.append(InputTensor(name, one.datatype, one.shape[:], contents))
    return tensors


def _output(data: bytes) -> RequestedOutput:
    one = _decoded(data, ModelInferRequest.InferRequestedOutputTensor, ModelInferRequest)
    for extension in ("shared_memory_region", "classification"):
        _refuse(one.parameters, "outputs.parameters", extension)
    return RequestedOutput(one.name)


def _refuse(parameters: Mapping[str, InferParameter], path: str, extension: str) -> None:
    if extension in parameters:
        raise UnsupportedExtensionError(f"{path}.{extension}", "it is not spoken here")


def _value(parameters: Mapping[str, infer_wire_pb2.InferParameter], name: str) -> tuple[str | None, Any]:
    # A map of messages makes an entry of what is looked up and not there.
    if name not in parameters:
        return None, None
    choice = parameters[name].WhichOneof("parameter_choice")
    return choice, None if choice is None else getattr(parameters[name], choice)


def _integer(parameters: Mapping[str, infer_wire_pb2.InferParameter], name: str) -> int | None:
    choice, value = _value(parameters, name)
    if value is not None and choice not in _INTEGERS:
        raise InvalidFieldError(f"parameters.{name}", f"it is a {choice}; it must be an int64_param")
    return None if value is None else int(value)


def _text(parameters: Mapping[str, infer_wire_pb2.InferParameter], name: str) -> str:
    choice, value = _value(parameters, name)
    if value is not None and choice != "string_param":
        raise InvalidFieldError(f"parameters.{name}", f"it is a {choice}; it must be a string_param")
    return "" if value is None else str(value)
