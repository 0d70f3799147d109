"""The gRPC server: its methods, and what of the service each calls."""

from __future__ import annotations

import asyncio
import math
import ssl
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from serving.api import documents
from serving.api.grpc.calls import GrpcCall, GrpcMethod, GrpcMethods, read_head, streamed
from serving.api.grpc.listener import Http2Listener, Http2Protocol
from serving.api.grpc.wire import ConnectionLimits, HeaderList
from serving.api.tokens import Scope, Tokens
from serving.errors import NotFoundError, invalid_field, malformed
from serving.formats.infer import InferGrpcCodec
from serving.formats.messages import MessageCodec, encode_model
from serving.formats.requests import Buffer, Codec
from serving.observe.calls import Call
from serving.proto.inference import open_inference_pb2 as inference
from serving.proto.shardrank.v1 import ranking_pb2
from serving.rank.service import RankingService, answer

HEALTH_INTERVAL_S = 0.25
RANKING = ranking_pb2.DESCRIPTOR.services_by_name["RankingService"].full_name
INFERENCE = inference.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
KNOWN_TO_HEALTH = ("", RANKING, INFERENCE)
DESCRIBE: Scope = "describe"
PUBLIC = ("ServerLive", "ServerReady")
"""Methods of the Open Inference Protocol that need no token."""
REFLECTION = ("grpc.reflection.v1", "grpc.reflection.v1alpha")

_Read = TypeVar("_Read", bound=Message)


class GrpcServer(Http2Listener):
    """A gRPC listener over one service; without `tokens` everybody may do everything; the context `tls` offers `h2`."""

    def __init__(
        self, service: RankingService, tokens: Tokens | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        limits, patience_s = service.limits, service.limits.receive_timeout_s / 2
        connection_limits = ConnectionLimits(
            max_connections=limits.max_connections,
            max_streams=limits.max_concurrent_streams,
            max_header_bytes=limits.max_header_bytes,
            max_idle_work_s=limits.max_idle_work_ms / 1000 or math.inf,
            patience_s=patience_s,
            idle_s=limits.keep_alive_s,
            age_s=limits.max_connection_age_s,
            # No admitted call lasts longer, so a connection that is asked to go loses none.
            grace_s=limits.max_timeout_ms / 1000 + 4 * patience_s,
        )
        super().__init__(connection_limits, service.buffers, time.monotonic, tls)
        self._failed = service.metrics.failed
        by_path = health_methods(service.watch.problems) | reflection_methods()
        by_path |= ranking_methods(service) | inference_methods(service)
        self._methods = GrpcMethods(by_path, limits.receive_timeout_s, service.expanding, tokens)

    def new_stream(self, connection: Http2Protocol, stream_id: int, request: HeaderList) -> GrpcCall:
        """Make a call of a stream."""
        return GrpcCall(connection, stream_id, read_head(request, self.limits.max_header_bytes), self._methods)

    def note(self, kind: str) -> None:
        """See `ConnectionListener`."""
        self._failed("grpc", "connection", kind)

    async def stop(self, grace_s: float) -> None:
        """Take no new connections, and give the calls in flight `grace_s` seconds."""
        self._methods.end_streamed()
        await super().stop(grace_s)
        if self._methods.tasks:
            await asyncio.wait(list(self._methods.tasks))


def ranking_methods(service: RankingService) -> dict[bytes, GrpcMethod]:
    """Those of `shardrank.v1.RankingService`."""

    def describe(call: Call, request: ranking_pb2.GetModelRequest) -> bytes:
        _check_model(request.model)
        version = request.version if request.HasField("version") else None
        description = service.describe(request.model, version)
        call.model = description.model
        return encode_model(description)

    return _paths(
        RANKING,
        {
            "Rank": _ranked(service, MessageCodec("rank", api="grpc")),
            "Lookup": _ranked(service, MessageCodec("lookup", api="grpc")),
            "GetModel": _document(service, "grpc", ranking_pb2.GetModelRequest, describe),
        },
    )


def inference_methods(service: RankingService) -> dict[bytes, GrpcMethod]:
    """Those of `inference.GRPCInferenceService`."""

    def model_of(request: Any) -> tuple[RankingService, str, str]:
        _check_model(request.name)
        return service, request.name, request.version

    # By method the fields of its response.
    fields_of: dict[str, Callable[[Any], dict[str, Any]]] = {
        "ServerLive": lambda _: {"live": True},
        "ServerReady": lambda _: {"ready": not service.watch.problems()},
        "ModelReady": lambda request: {"ready": documents.model_is_ready(*model_of(request))},
        "ServerMetadata": lambda _: documents.server_metadata(service),
        "ModelMetadata": lambda request: documents.model_metadata(*model_of(request)),
        "ModelConfig": lambda request: {"config": documents.model_config(*model_of(request))},
        "ModelStatistics": lambda request: documents.model_statistics(service, request.name, request.version),
        "RepositoryIndex": lambda request: {"models": documents.version_index(service, ready_only=request.ready)},
    }

    def respond(response: Any, fields: Callable[[Any], dict[str, Any]], _: Call, request: Any) -> bytes:
        return response(**fields(request)).SerializeToString()  # type: ignore[no-any-return]  # of no known class

    methods = {"ModelInfer": _ranked(service, InferGrpcCodec())}
    for name, fields in fields_of.items():
        kind, response = getattr(inference, f"{name}Request"), getattr(inference, f"{name}Response")
        is_probe, scope = name.endswith(("Live", "Ready")), None if name in PUBLIC else DESCRIBE
        methods[name] = _document(service, "oip_grpc", kind, partial(respond, response, fields), scope, is_probe)
    return _paths(INFERENCE, methods)


def health_methods(problems: Callable[[], object]) -> dict[bytes, GrpcMethod]:
    """`grpc.health.v1.Health`: one state for all that the process serves, good while it has no `problems`."""

    def state_of(name: str) -> bytes:
        response = health_pb2.HealthCheckResponse
        status = response.NOT_SERVING if problems() else response.SERVING
        message: Message = response(status=status if name in KNOWN_TO_HEALTH else response.SERVICE_UNKNOWN)
        return message.SerializeToString()

    async def check(call: GrpcCall) -> bytes:
        name = _decoded(await call.receive(), health_pb2.HealthCheckRequest).service
        if name not in KNOWN_TO_HEALTH:
            raise NotFoundError("there is no such service", kind="unknown_service")
        return state_of(name)

    async def watch(call: GrpcCall) -> AsyncGenerator[bytes]:
        name, last = _decoded(await call.receive(), health_pb2.HealthCheckRequest).service, None
        while True:
            if (state := state_of(name)) != last:
                yield state
            last = state
            await asyncio.sleep(HEALTH_INTERVAL_S)

    return _paths(HEALTH, {"Check": GrpcMethod(check), "Watch": streamed(watch)})


def reflection_methods() -> dict[bytes, GrpcMethod]:
    """Server reflection, in both of its versions: their messages are the same but for the package's name."""
    pool, names = DescriptorPool(), []
    file = FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb)
    text = text_format.MessageToString(file)
    for module in (ranking_pb2, inference, health_pb2):
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
        names += [service.full_name for service in module.DESCRIPTOR.services_by_name.values()]
    for package in REFLECTION:
        version = text_format.Parse(text.replace(file.package, package), FileDescriptorProto())
        version.name = f"{package.replace('.', '/')}/reflection.proto"
        pool.Add(version)
        names.append(f"{package}.ServerReflection")
    servicer = reflection.aio.ReflectionServicer(names, pool)  # type: ignore[attr-defined]  # absent from the stubs

    async def describe(call: GrpcCall) -> AsyncGenerator[bytes]:
        requests = (_decoded(data, reflection_pb2.ServerReflectionRequest) async for data in call.messages())
        async for response in servicer.ServerReflectionInfo(requests, None):
            yield response.SerializeToString()

    method = streamed(describe, "describe")
    return {f"/{package}.ServerReflection/ServerReflectionInfo".encode(): method for package in REFLECTION}


def _ranked(service: RankingService, codec: Codec) -> GrpcMethod:
    async def ranked(call: GrpcCall, admitted: Call) -> bytes:
        return (await answer(service, admitted, codec, call.receive(), call, call.head.trace_parent)).body

    def admit(call: GrpcCall) -> Awaitable[bytes]:
        return ranked(call, service.admit(codec.api, codec.method, call.time_remaining(), call.head.request_id))

    return GrpcMethod(admit, service.limits.max_body_bytes, "rank")


def _document(
    service: RankingService,
    api: str,
    kind: type[_Read],
    respond: Callable[[Call, _Read], bytes],
    scope: Scope | None = DESCRIBE,
    is_probe: bool = False,
) -> GrpcMethod:
    """Return a method that reads what is known; a probe is answered under any load."""

    async def document(call: GrpcCall) -> bytes:
        with service.call(api, "model", call.head.request_id) as counted:
            data = await call.receive()
            counted.received_at = service.clock()
            if not is_probe:
                service.complete(counted)
            return respond(counted, _decoded(data, kind))

    return GrpcMethod(document, scope=scope)


def _paths(service: str, methods: dict[str, GrpcMethod]) -> dict[bytes, GrpcMethod]:
    return {f"/{service}/{name}".encode(): method for name, method in methods.items()}


def _decoded(data: Buffer, kind: type[_Read]) -> _Read:
    try:
        return kind.FromString(bytes(data))
    except DecodeError as error:
        raise malformed("", f"the message is not a {kind.DESCRIPTOR.full_name}: {error}") from None


def _check_model(model: str) -> None:
    if not model:
        raise invalid_field("model", "it is empty; it must be the name of a served model")
