"""The gRPC server: its methods, and what of the service each calls."""

from __future__ import annotations

import asyncio
import math
import ssl
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from loader.errors import OverloadedError
from serving.api import documents
from serving.api.grpc.calls import GrpcCall, GrpcMethod, GrpcMethods, read_head, streamed
from serving.api.grpc.listener import Http2Listener, Http2Protocol
from serving.api.grpc.wire import ConnectionLimits, HeaderList
from serving.api.tokens import Scope, Tokens
from serving.errors import REPOSITORY_CONTROL, InvalidRequestError, NotFoundError, invalid_field, malformed
from serving.formats.infer import InferGrpcCodec
from serving.formats.messages import MessageCodec, encode_model
from serving.formats.requests import Buffer, Codec
from serving.observe.calls import Call
from serving.proto.inference import open_inference_pb2 as inference
from serving.proto.shardrank.v1 import ranking_pb2
from serving.rank.service import RankingService, answer

HEALTH_INTERVAL_S, WATCHERS_GRACE_S = 0.5, 0.1
MAX_WATCHES_PER_CONNECTION = 64
CALL_WORTH_S = 1e-3
"""Work at the front that a ranking call makes good, in addition to that of its bytes."""
RANKING = ranking_pb2.DESCRIPTOR.services_by_name["RankingService"].full_name
INFERENCE = inference.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
KNOWN_TO_HEALTH = ("", RANKING, INFERENCE)
REFLECTION = ("grpc.reflection.v1", "grpc.reflection.v1alpha")

_Read = TypeVar("_Read", bound=Message)


class GrpcServer:
    """A gRPC listener over one service; without `tokens` everybody may do everything; the context `tls` offers `h2`."""

    def __init__(
        self, service: RankingService, tokens: Tokens | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        limits = service.limits
        self._health = Health(service.watch.problems)
        by_path = self._health.by_path() | reflection_methods() | ranking_methods(service) | inference_methods(service)
        self._methods = GrpcMethods(by_path, limits.receive_timeout_s, service.expanding, tokens)

        def make_call(connection: Http2Protocol, stream_id: int, request: HeaderList) -> GrpcCall:
            return GrpcCall(connection, stream_id, read_head(request, limits.max_header_bytes), self._methods)

        patience_s = limits.receive_timeout_s / 2
        connection_limits = ConnectionLimits(
            max_streams=limits.max_concurrent_streams,
            max_header_bytes=limits.max_header_bytes,
            patience_s=patience_s,
            idle_s=limits.keep_alive_s,
            age_s=limits.max_connection_age_s,
            # No admitted call lasts longer, so a connection that is asked to go loses none.
            grace_s=limits.max_timeout_ms / 1000 + 4 * patience_s,
        )
        self._listener = Http2Listener(
            connection_limits,
            limits.max_connections,
            service.buffers,
            make_call,
            time.monotonic,
            limits.max_idle_work_ms / 1000 or math.inf,
            tls,
            partial(service.metrics.failed, "grpc", "connection"),
        )
        self._watcher: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen, as `ConnectionListener.listen` does. Returns the port. Raises ConfigError."""
        bound = self._listener.listen(host, port, "gRPC")
        self._watcher = asyncio.create_task(self._health.watch())
        return bound

    async def stop(self, grace_s: float) -> None:
        """Take no new connections, and give the calls in flight `grace_s` seconds."""
        if self._watcher is not None:
            self._watcher.cancel()
        self._health.stop()
        # Those who watch the health hear first that it has ended.
        asyncio.get_running_loop().call_later(min(WATCHERS_GRACE_S, grace_s), self._methods.end_streamed)
        await self._listener.stop(grace_s)
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

    def refuse(_: Any) -> Any:
        raise InvalidRequestError("", REPOSITORY_CONTROL, kind="repository_control")

    def model_of(request: Any) -> tuple[RankingService, str, str]:
        _check_model(request.name)
        return service, request.name, request.version

    # By method the fields of its response, and the scope that it needs.
    fields_of: dict[str, tuple[Callable[[Any], dict[str, Any]], Scope | None]] = {
        "ServerLive": (lambda _: {"live": True}, None),
        "ServerReady": (lambda _: {"ready": not service.watch.problems()}, None),
        "ModelReady": (lambda request: {"ready": documents.model_is_ready(*model_of(request))}, "describe"),
        "ServerMetadata": (lambda _: documents.server_metadata(service), "describe"),
        "ModelMetadata": (lambda request: documents.model_metadata(*model_of(request)), "describe"),
        "ModelConfig": (lambda request: {"config": documents.model_config(*model_of(request))}, "describe"),
        "ModelStatistics": (
            lambda request: documents.model_statistics(service, request.name, request.version),
            "describe",
        ),
        "RepositoryIndex": (
            lambda request: {"models": documents.version_index(service, ready_only=request.ready)},
            "describe",
        ),
        "RepositoryModelLoad": (refuse, "admin"),
        "RepositoryModelUnload": (refuse, "admin"),
    }

    def respond(response: Any, fields: Callable[[Any], dict[str, Any]], _: Call, request: Any) -> bytes:
        return response(**fields(request)).SerializeToString()  # type: ignore[no-any-return]  # of no known class

    methods = {"ModelInfer": _ranked(service, InferGrpcCodec())}
    for name, (fields, scope) in fields_of.items():
        kind, response = getattr(inference, f"{name}Request"), getattr(inference, f"{name}Response")
        is_probe = name.endswith(("Live", "Ready"))
        answer_by = partial(respond, response, fields)
        methods[name] = _document(service, "oip_grpc", kind, answer_by, scope, is_probe=is_probe)
    return _paths(INFERENCE, methods)


class Health:
    """`grpc.health.v1.Health`: one state for all that the process serves, good while it has no `problems`."""

    def __init__(self, problems: Callable[[], object]) -> None:
        self._problems = problems
        self._is_serving = self._is_stopping = False
        self._changed = asyncio.Event()
        self._watches = Counter[Http2Protocol]()

    async def watch(self) -> None:
        """Refresh the state for ever."""
        while True:
            self._refresh()
            await asyncio.sleep(HEALTH_INTERVAL_S)

    def stop(self) -> None:
        """Serve no more, whatever the problems."""
        self._is_stopping = True
        self._refresh()

    def by_path(self) -> dict[bytes, GrpcMethod]:
        """Its methods."""
        return _paths(HEALTH, {"Check": GrpcMethod(self._check), "Watch": streamed(self._watch)})

    def _refresh(self) -> None:
        is_serving = not self._is_stopping and not self._problems()
        if is_serving != self._is_serving:
            self._is_serving = is_serving
            self._changed.set()
            self._changed = asyncio.Event()

    async def _check(self, call: GrpcCall) -> bytes:
        name = _decoded(await call.receive(), health_pb2.HealthCheckRequest).service
        if name not in KNOWN_TO_HEALTH:
            raise NotFoundError("there is no such service", kind="unknown_service")
        self._refresh()
        return self._message(name)

    async def _watch(self, call: GrpcCall) -> AsyncGenerator[bytes]:
        connection, watches = call.connection, self._watches
        if (count := watches[connection]) >= MAX_WATCHES_PER_CONNECTION:
            problem = f"the connection has {count} calls of Watch, as many as are allowed"
            raise OverloadedError(problem, kind="too_many_watches")
        watches[connection] += 1
        try:
            name = _decoded(await call.receive(), health_pb2.HealthCheckRequest).service
            while True:
                self._refresh()
                changed = self._changed
                yield self._message(name)
                await changed.wait()
        finally:
            watches[connection] -= 1
            if not watches[connection]:
                del watches[connection]

    def _message(self, name: str) -> bytes:
        response = health_pb2.HealthCheckResponse
        status = response.SERVING if self._is_serving else response.NOT_SERVING
        message: Message = response(status=status if name in KNOWN_TO_HEALTH else response.SERVICE_UNKNOWN)
        return message.SerializeToString()


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
        return ranked(call, service.admit(codec.api, codec.method, call.time_remaining()))

    return GrpcMethod(admit, service.limits.max_body_bytes, "rank", CALL_WORTH_S)


def _document(
    service: RankingService,
    api: str,
    kind: type[_Read],
    respond: Callable[[Call, _Read], bytes],
    scope: Scope | None = "describe",
    *,
    is_probe: bool = False,
) -> GrpcMethod:
    """Return a method that reads what is known; a probe is answered under any load."""

    async def document(call: GrpcCall) -> bytes:
        with service.call(api, "model") as counted:
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
