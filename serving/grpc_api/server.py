"""The grpc.aio server: options, health and reflection."""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from serving.errors import ListenError
from serving.grpc_api.handlers import SERVICE_NAME, Handlers
from serving.limits import RequestLimits
from serving.oip.grpc_handlers import SERVICE_NAME as INFERENCE_SERVICE_NAME
from serving.oip.grpc_handlers import InferHandlers
from serving.oip.reflected import reflected_services
from serving.service import RankingService

HEALTH_INTERVAL_S = 0.5


class GrpcServer:
    """A gRPC listener over one service."""

    def __init__(self, service: RankingService) -> None:
        self._service = service
        self._server = grpc.aio.server(options=server_options(service.limits))
        handlers = (Handlers(service).generic_handler(), InferHandlers(service).generic_handler())
        self._server.add_generic_rpc_handlers(handlers)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # absent from the stubs
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names, pool = reflected_services()
        reflection.enable_server_reflection(names, self._server, pool)
        self._watcher: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Listens. Returns the port, which is a free one if 0 was asked for.

        Raises:
            ListenError: if the port can't be bound.
        """
        try:
            bound = self._server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        except RuntimeError as error:
            raise ListenError(f"can't listen for gRPC on {host}:{port}: {error}") from error
        await self._server.start()
        await self._set_health()
        self._service.watch.listen(self._set_health)
        self._watcher = asyncio.create_task(self._watch())
        return bound

    async def stop(self, grace_s: float) -> None:
        """Takes no new calls, and gives those in flight `grace_s` seconds."""
        if self._watcher is not None:
            self._watcher.cancel()
            self._service.watch.unlisten(self._set_health)
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)

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


def server_options(limits: RequestLimits) -> list[tuple[str, int]]:
    """Channel arguments, see https://github.com/grpc/grpc/blob/master/include/grpc/impl/channel_arg_names.h."""
    half_ms = max(1, int(limits.receive_timeout_s * 500))
    # No call that was taken lasts longer, so a connection that is asked to go loses none.
    longest_call_ms = limits.max_timeout_ms + 4 * half_ms
    return [
        # Twice the limit of a message: what is a little too long is refused with INVALID_ARGUMENT and the limit's name,
        # what is far too long by the library, before it is read, with RESOURCE_EXHAUSTED.
        ("grpc.max_receive_message_length", min(2 * limits.max_body_bytes, 2**31 - 1)),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", limits.max_header_bytes),
        ("grpc.max_concurrent_streams", limits.max_concurrent_streams),
        # Clients keep to the number of streams by waiting; but they open one when the last has ended for them, which is
        # before it has ended here. The library resets such streams at random, unless this is off. The limit itself
        # still holds.
        ("grpc.http.overload_protection", 0),
        ("grpc.max_connection_idle_ms", max(1, int(limits.keep_alive_s * 1000))),
        ("grpc.max_connection_age_ms", max(1, int(limits.max_connection_age_s * 1000))),
        ("grpc.max_connection_age_grace_ms", longest_call_ms),
        ("grpc.server_handshake_timeout_ms", 2 * half_ms),
        ("grpc.http2.settings_timeout", 2 * half_ms),
        # A peer that answers no ping, because it is dead or stalled, is dropped after time and timeout together. It is
        # the ping's own timeout that ends a connection on which other bytes went by before.
        ("grpc.keepalive_time_ms", half_ms),
        ("grpc.keepalive_timeout_ms", half_ms),
        ("grpc.http2.ping_timeout_ms", half_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.so_reuseport", 1),
    ]
