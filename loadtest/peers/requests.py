"""The requests as each peer takes them, made before they are sent: the same ones for every server."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from loadtest.peers.catalog import PEERS, Body
from loadtest.peers.config import SHARDRANK
from loadtest.peers.model import request_arrays
from loadtest.serving_cost.client_process import RequestPool
from loadtest.serving_cost.shape import REQUESTS_IN_POOL, SEED, Shape, payloads, workload
from loadtest.workloads import oip_payload
from loadtest.workloads.errors import AnswerError
from loadtest.workloads.payloads import Payload
from loadtest.workloads.workload import WorkloadRequest

_HEADER = struct.Struct("<4I")
_FLOAT_BYTES = 4
_BINARY = (("content-type", "application/octet-stream"),)


def flat_body(request: WorkloadRequest) -> bytes:
    """Little-endian, candidate by candidate.

    Four uint32 (candidates, features, ids, dense inputs), int64 ids, int32 ids of each bag, float32 dense inputs.
    """
    lengths, ids, dense = request_arrays(request)
    header = _HEADER.pack(*lengths.shape, ids.size, dense.shape[1])
    arrays = (ids.astype("<i8", copy=False), lengths.astype("<i4", copy=False), dense.astype("<f4", copy=False))
    return b"".join([header, *(one.tobytes() for one in arrays)])


def tensor_body(request: WorkloadRequest) -> tuple[bytes, int]:
    """An infer request of the Open Inference Protocol with binary tensors `ids`, `lengths`, `dense`, and its header.

    Each has a batch of one request, since requests differ in all else.
    """
    lengths, ids, dense = request_arrays(request)
    tensors: list[tuple[str, str, npt.NDArray[Any]]] = [
        ("ids", "INT64", ids),
        ("lengths", "INT32", lengths),
        ("dense", "FP32", dense),
    ]
    inputs = [
        {"name": name, "datatype": kind, "shape": [1, *one.shape], "parameters": {"binary_data_size": one.nbytes}}
        for name, kind, one in tensors
    ]
    outputs = [{"name": oip_payload.SCORES, "parameters": {"binary_data": True}}]
    header = msgspec.json.encode({"inputs": inputs, "outputs": outputs})
    return b"".join([header, *(one.tobytes() for *_, one in tensors)]), len(header)


class PeerRequests:
    """A pool of requests for a peer. Has what the client of `loadtest.serving_cost` asks of one."""

    is_grpc = False

    def __init__(self, shape: Shape, hotness: int, path: str, body: Body) -> None:
        self.path = path
        self._body = body
        self._payloads = [self._payload(request) for request in drawn_requests(shape, hotness, REQUESTS_IN_POOL)]

    @property
    def api(self) -> str:
        """What an error names."""
        return self.path

    def check(self, answer: bytes) -> int:
        """How many scores an answer has. Raises AnswerError."""
        if self._body == "tensors":
            return oip_payload.count_http_scores(answer)
        if len(answer) % _FLOAT_BYTES:
            raise AnswerError(f"an answer of {len(answer)} bytes is not of float32 scores")
        return len(answer) // _FLOAT_BYTES

    def __getitem__(self, index: int) -> Payload:
        return self._payloads[index]

    def __len__(self) -> int:
        return len(self._payloads)

    def __iter__(self) -> Iterator[Payload]:
        return iter(self._payloads)

    def _payload(self, request: WorkloadRequest) -> Payload:
        if self._body == "flat":
            return Payload(flat_body(request), _BINARY, request.num_candidates)
        body, header_bytes = tensor_body(request)
        headers = (*_BINARY, (oip_payload.HEADER_LENGTH, str(header_bytes)))
        return Payload(body, headers, request.num_candidates)


def drawn_requests(shape: Shape, hotness: int, count: int) -> list[WorkloadRequest]:
    """The first requests of the pool, which is the same for every server."""
    made, rng = workload(shape, "mlp", hotness), np.random.default_rng(SEED)
    return [made.request(rng) for _ in range(count)]


def requests_for(shape: Shape, server: str, hotness: int) -> RequestPool:
    """The pool for a server: a peer's name, `shardrank` or `shardrank-grpc`."""
    if server in SHARDRANK:
        return payloads(shape, "mlp", hotness, SHARDRANK[server])
    return PeerRequests(shape, hotness, PEERS[server].path, PEERS[server].body)
