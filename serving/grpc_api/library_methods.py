"""Methods of the gRPC library's own services, health and reflection, on this server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import grpc

from loader.errors import ShardrankError
from serving.grpc_api.call_stream import STOPPING, CallStream, Method

logger = logging.getLogger(__name__)


class LibraryMethods:
    """Takes the place of a `grpc.aio.Server` where a library registers a service."""

    def __init__(self) -> None:
        self.by_path: dict[bytes, Method] = {}

    def add_generic_rpc_handlers(self, handlers: Iterable[object]) -> None:
        """They come as registered ones too."""

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """Adds the methods of a service."""
        for name, handler in handlers.items():
            self.by_path[f"/{service}/{name}".encode()] = _LibraryMethod(handler)


class _AbortedError(Exception):
    """The handler has ended the call."""


class _Context:
    """What those services ask of a `grpc.aio.ServicerContext`."""

    def __init__(self, call: CallStream, handler: grpc.RpcMethodHandler[Any, Any]) -> None:
        self._call, self._handler = call, handler
        self.code, self.details = grpc.StatusCode.OK, ""

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        self.code, self.details = code, details
        raise _AbortedError

    async def write(self, message: Any) -> None:
        serialize: Any = self._handler.response_serializer
        await self._call.write(serialize(message))


class _LibraryMethod:
    is_streamed = True

    def __init__(self, handler: grpc.RpcMethodHandler[Any, Any]) -> None:
        self._handler: Any = handler

    async def run(self, call: CallStream) -> None:
        context = _Context(call, self._handler)
        code, details = grpc.StatusCode.INTERNAL, "internal error; the server's log says more"
        try:
            async with asyncio.timeout(call.time_remaining()):
                await self._answer(call, context)
            code, details = context.code, context.details
        except _AbortedError:
            code, details = context.code, context.details
        except TimeoutError:
            code, details = grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed"
        except ShardrankError as error:
            code, details = grpc.StatusCode[error.grpc_status], str(error)
        except NotImplementedError as error:
            code, details = grpc.StatusCode.UNIMPLEMENTED, str(error)
        except asyncio.CancelledError:
            # By the client, who hears nothing of it, or because the server stops.
            call.end(grpc.StatusCode.UNAVAILABLE, STOPPING)
            raise
        except Exception:
            logger.exception("gRPC method %s failed", call.head.path.decode("latin-1"))
        call.end(code, details)

    async def _answer(self, call: CallStream, context: _Context) -> None:
        handler = self._handler
        requests = self._requests(call)
        argument = requests if handler.request_streaming else await anext(requests, None)
        if argument is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no request message")
        behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        answered = behaviour(argument, context)
        if hasattr(answered, "__aiter__"):
            async for message in answered:
                await context.write(message)
        elif handler.response_streaming:
            await answered
        else:
            message = await answered
            await context.write(message)

    async def _requests(self, call: CallStream) -> AsyncIterator[Any]:
        async for data in call.messages():
            yield self._handler.request_deserializer(data)
