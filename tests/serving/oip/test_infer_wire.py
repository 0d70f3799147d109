from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import given
from hypothesis import strategies as st

from serving.proto.inference import open_inference_pb2 as public
from serving.proto.shardrank.v1 import infer_wire_pb2 as wire

LEFT_UNDECODED = ("inputs", "outputs")


def flat(message: Descriptor) -> list[Any]:
    fields = []
    for field in message.fields:
        kind = field.type
        if field.name in LEFT_UNDECODED and kind == FieldDescriptor.TYPE_MESSAGE:
            kind = FieldDescriptor.TYPE_BYTES
        oneof = field.containing_oneof.name if field.containing_oneof is not None else None
        fields.append((field.name, field.number, kind, field.is_repeated, oneof))
    return fields


def test_the_wire_types_differ_from_the_public_ones_only_in_messages_left_undecoded():
    for ours, theirs in (
        (wire.ModelInferRequest, public.ModelInferRequest),
        (wire.InferParameter, public.InferParameter),
    ):
        assert flat(ours.DESCRIPTOR) == flat(theirs.DESCRIPTOR)
    entry = wire.ModelInferRequest.DESCRIPTOR.nested_types_by_name["ParametersEntry"]
    assert flat(entry) == flat(public.ModelInferRequest.DESCRIPTOR.nested_types_by_name["ParametersEntry"])


@given(
    names=st.lists(st.text(max_size=4), max_size=4),
    shapes=st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3), min_size=4, max_size=4),
    raw=st.lists(st.binary(max_size=8), max_size=4),
    top_k=st.integers(0, 9),
)
def test_the_wire_types_read_what_the_public_types_write(names, shapes, raw, top_k):
    message = public.ModelInferRequest(model_name="m", id="i", raw_input_contents=raw)
    for name, shape in zip(names, shapes, strict=False):
        message.inputs.add(name=name, datatype="INT64", shape=shape)
    message.outputs.add(name="scores")
    message.parameters["top_k"].int64_param = top_k
    read = wire.ModelInferRequest.FromString(message.SerializeToString())
    assert (read.model_name, read.id, read.parameters["top_k"].int64_param) == ("m", "i", top_k)
    assert [public.ModelInferRequest.InferInputTensor.FromString(one) for one in read.inputs] == list(message.inputs)
    assert list(read.raw_input_contents) == raw
    assert len(read.outputs) == 1
