"""One request in every form that the server takes: JSON, messages, and the Open Inference Protocol."""

from __future__ import annotations

from typing import Any

import numpy as np

from serving.formats.schema import RequestSchema
from serving.proto.shardrank.v1 import ranking_pb2


def packed_message(schema: RequestSchema, request: dict[str, Any], model: str = "films") -> ranking_pb2.RankRequest:
    """The JSON form of a rank request as a packed message, by plain loops."""
    num_candidates = len(request["candidates"]["dense"])
    integers: list[int] = []
    strings: list[str] = []
    lengths: list[int] = []
    weights: list[float] = []
    has_weights = False
    for name, is_context, is_string in schema.kinds:
        part = request["context" if is_context else "candidates"]
        ids, own = part["sparse"][name], (part.get("weights") or {}).get(name)
        has_weights |= own is not None
        is_nested = not is_context and ids and isinstance(ids[0], list)
        bags = [ids] if is_context else ids if is_nested else [[one] for one in ids]
        flat = [one for bag in bags for one in bag]
        lengths += [len(bag) for bag in bags]
        (strings if is_string else integers).extend(flat)
        if own is None:
            weights += [1.0] * len(flat)
        else:
            weights += [one for bag in own for one in bag] if is_nested else own
    message = ranking_pb2.RankRequest(
        model=model,
        num_candidates=num_candidates,
        timeout_ms=request.get("timeout_ms", 0),
        top_k=request.get("top_k", 0),
        request_id=request.get("request_id", ""),
    )
    packed = message.packed
    packed.schema_digest = schema.features.digest
    packed.ids = np.array(integers, "<i8").tobytes()
    packed.lengths = np.array(lengths, "<i4").tobytes()
    packed.weights = np.array(weights if has_weights else [], "<f4").tobytes()
    packed.context_dense = np.array(request["context"]["dense"], "<f4").tobytes()
    packed.candidate_dense = np.array(request["candidates"]["dense"], "<f4").tobytes()
    packed.string_ids.extend(strings)
    return message
