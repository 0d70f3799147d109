"""The gRPC form of an inference request: `ModelInferRequest`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from serving.errors import InvalidFieldError, MalformedRequestError
from serving.oip.contents_data import ContentsData
from serving.oip.errors import UnsupportedExtensionError
from serving.oip.infer_request import InferRequest, InputTensor, RequestedOutput, input_path, parse_version
from serving.oip.raw_data import RawData
from serving.oip.read_http import MAX_INPUTS
from serving.parse_proto import check_model
from serving.proto.inference.open_inference_pb2 import InferParameter, ModelInferRequest

Read = TypeVar("Read", bound=Message)
_INTEGERS = ("int64_param", "uint64_param")


def read_message(data: bytes, message_type: type[Read]) -> Read:
    """Decodes a message. Raises MalformedRequestError."""
    try:
        return message_type.FromString(data)
    except DecodeError as error:
        name = message_type.DESCRIPTOR.full_name
        raise MalformedRequestError("", f"the message is not a {name}: {error}") from error


def read_infer(data: bytes) -> InferRequest:
    """Reads a request.

    Raises:
        MalformedRequestError: if it is no such message.
        InvalidFieldError: for a value that can't be.
        UnsupportedExtensionError: for a part of the protocol's extensions that is not spoken here.
    """
    message = read_message(data, ModelInferRequest)
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
        inputs=_inputs(message),
        outputs=[_output(one) for one in message.outputs] or None,
        binary_output=True,
        timeout_ms=_integer(parameters, "timeout_ms"),
        timeout_us=_integer(parameters, "timeout"),
        top_k=_integer(parameters, "top_k"),
        routing_key=_text(parameters, "routing_key"),
    )


def _inputs(message: ModelInferRequest) -> list[InputTensor]:
    inputs, raw = message.inputs, list(message.raw_input_contents)
    if len(inputs) > MAX_INPUTS:
        raise InvalidFieldError("inputs", f"{len(inputs)} inputs; at most {MAX_INPUTS} are taken")
    if raw and len(raw) != len(inputs):
        raise InvalidFieldError(
            "raw_input_contents", f"{len(raw)} of them; there must be one for each of {len(inputs)} inputs"
        )
    tensors = []
    for number, one in enumerate(inputs):
        _refuse(one.parameters, f"{input_path(one.name)}.parameters", "shared_memory_region")
        if raw and one.HasField("contents"):
            raise InvalidFieldError(f"{input_path(one.name)}.contents", "it is given beside raw_input_contents")
        contents = RawData(raw[number]) if raw else ContentsData(one.contents)
        tensors.append(InputTensor(one.name, one.datatype, list(one.shape), contents))
    return tensors


def _output(message: ModelInferRequest.InferRequestedOutputTensor) -> RequestedOutput:
    _refuse(message.parameters, "outputs.parameters", "shared_memory_region")
    _refuse(message.parameters, "outputs.parameters", "classification")
    return RequestedOutput(message.name)


def _refuse(parameters: Mapping[str, InferParameter], path: str, extension: str) -> None:
    if extension in parameters:
        raise UnsupportedExtensionError(f"{path}.{extension}", "it is not spoken here")


def _value(parameters: Mapping[str, InferParameter], name: str) -> tuple[str | None, Any]:
    # A map of messages makes an entry of what is looked up and not there.
    if name not in parameters:
        return None, None
    choice = parameters[name].WhichOneof("parameter_choice")
    return choice, None if choice is None else getattr(parameters[name], choice)


def _integer(parameters: Mapping[str, InferParameter], name: str) -> int | None:
    choice, value = _value(parameters, name)
    if value is not None and choice not in _INTEGERS:
        raise InvalidFieldError(f"parameters.{name}", f"it is a {choice}; it must be an int64_param")
    return None if value is None else int(value)


def _text(parameters: Mapping[str, InferParameter], name: str) -> str:
    choice, value = _value(parameters, name)
    if value is not None and choice != "string_param":
        raise InvalidFieldError(f"parameters.{name}", f"it is a {choice}; it must be a string_param")
    return "" if value is None else str(value)
