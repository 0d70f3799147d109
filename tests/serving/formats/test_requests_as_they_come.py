"""Requests in every form on the whole road: right scores, and no warning for memory that must not be written to."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from serving.embedded import Ranker
from serving.formats.infer import InferGrpcCodec, InferHttpCodec
from serving.formats.json_reader import JsonCodec
from serving.formats.messages import MessageCodec
from serving.formats.requests import Codec
from serving.rank.service import answer
from shardrank_testing.inference_requests import binary_body, json_body, message_of, tensors_of
from shardrank_testing.parsing import SCHEMA, SPEC
from shardrank_testing.serving_api import MODEL, KeptAnswers, Waiting, api_request, packed_message, rank_message


def forms(request: dict[str, Any]) -> dict[str, tuple[Codec, bytes]]:
    tensors = tensors_of(SPEC, request)
    body, headers = binary_body(tensors)
    return {
        "json": (JsonCodec("rank", MODEL), json.dumps(request).encode()),
        "maps": (MessageCodec("rank"), rank_message(request).SerializeToString()),
        "packed": (MessageCodec("rank"), packed_message(SCHEMA, request).SerializeToString()),
        "infer, JSON": (InferHttpCodec(model=MODEL, header_length=None), json_body(tensors)),
        "infer, binary": (InferHttpCodec(model=MODEL, header_length=headers["inference-header-content-length"]), body),
        "infer, raw": (InferGrpcCodec(), message_of(tensors, MODEL).SerializeToString()),
        "infer, typed": (InferGrpcCodec(), message_of(tensors, MODEL, raw=False).SerializeToString()),
    }


@pytest.mark.parametrize("as_type", [bytes, bytearray, lambda body: memoryview(bytearray(body))])
@pytest.mark.filterwarnings("error")
async def test_every_form_is_ranked_from_any_kind_of_buffer(api_model, api_service, as_type):
    for seed in range(3):
        request = api_request(seed, 1 + seed)
        expected = api_model.scores(request)
        for name, (codec, body) in forms(request).items():
            kept = KeptAnswers(codec)

            async def receive(body: bytes = body) -> Any:
                return as_type(body)

            call = api_service.admit(kept.api, kept.method, None)
            encoded = await answer(api_service, call, kept, receive(), Waiting())
            assert encoded.body
            np.testing.assert_allclose(kept.answers[0].scores, expected, rtol=1e-5, atol=1e-6, err_msg=f"{name} {seed}")


@pytest.mark.filterwarnings("error")
def test_the_in_process_call_ranks_without_a_warning(api_model, api_service):
    found = Ranker(api_service).rank(MODEL, **api_request(1))
    np.testing.assert_allclose(found.scores, api_model.scores(api_request(1)), rtol=1e-5, atol=1e-6)
