"""The gRPC server: its methods, with health and reflection, on an HTTP/2 listener."""

from __future__ import annotations

import asyncio
import functools

from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from serving.grpc_api.call_head import read_head
from serving.grpc_api.call_stream import Methods
from serving.grpc_api.handlers import SERVICE_NAME, Handlers
from serving.grpc_api.library_methods import LibraryMethods
from serving.http2.limits import ConnectionLimits
from serving.http2.listener import Http2Listener
from serving.limits import RequestLimits
from serving.oip.grpc_handlers import SERVICE_NAME as INFERENCE_SERVICE_NAME
from serving.oip.grpc_handlers import InferHandlers
from serving.oip.reflected import reflected_services
from serving.rank.service import RankingService

HEALTH_INTERVAL_S = 0.5
WATCHERS_GRACE_S = 0.1


class GrpcServer:
    """A gRPC listener over one service."""

    def __init__(self, service: RankingService) -> None:
        self._service = service
        library = LibraryMethods()
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # absent from the stubs
        health_pb2_grpc.add_HealthServicer_to_server(self._health, library)
        reflected = reflection.aio.ReflectionServicer(*reflected_services())  # type: ignore[attr-defined]
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflected, library)
        by_path = library.by_path | Handlers(service).by_path() | InferHandlers(service).by_path()
        self._methods = Methods(by_path, service.limits.max_body_bytes)
        limits = connection_limits(service.limits)
        read = functools.partial(read_head, max_bytes=limits.max_header_bytes)
        self._listener = Http2Listener("gRPC", limits, service.limits.max_connections, read, self._methods.make_stream)
        self._watcher: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Listens. Returns the port, which is a free one if 0 was asked for.

        Raises:
            ListenError: if the port can't be bound.
        """
        bound = await self._listener.start(host, port)
        await self._set_health()
        self._service.watch.listen(self._set_health)
        self._watcher = asyncio.create_task(self._watch())
        return bound

    async def stop(self, grace_s: float) -> None:
        """Takes no new connections, and gives the calls in flight `grace_s` seconds."""
        if self._watcher is not None:
            self._watcher.cancel()
            self._service.watch.unlisten(self._set_health)
        await self._health.enter_graceful_shutdown()
        # Those who watch the health are told first that it has ended.
        asyncio.get_running_loop().call_later(min(WATCHERS_GRACE_S, grace_s), self._methods.end_streamed)
        await self._listener.stop(grace_s)
        if self._methods.tasks:
            await asyncio.wait(list(self._methods.tasks))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            await self._set_health()

    async def _set_health(self) -> None:
        ready = not self._service.watch.problems()
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set("", status)
        await self._health.set(SERVICE_NAME, status)
        await self._health.set(INFERENCE_SERVICE_NAME, status)


def connection_limits(limits: RequestLimits) -> ConnectionLimits:
    """Of a connection, from those of requests."""
    patience_s = limits.receive_timeout_s / 2
    return ConnectionLimits(
        max_streams=limits.max_concurrent_streams,
        max_header_bytes=limits.max_header_bytes,
        patience_s=patience_s,
        idle_s=limits.keep_alive_s,
        age_s=limits.max_connection_age_s,
        # No call that was taken lasts longer, so a connection that is asked to go loses none.
        grace_s=limits.max_timeout_ms / 1000 + 4 * patience_s,
    )
