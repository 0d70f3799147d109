"""gRPC on streams (https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md): messages, statuses, calls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import quote

import grpc

from loader.errors import DeadlineExceededError, OverloadedError, ShardrankError, UnavailableError
from serving import errors
from serving.api.bodies import CODINGS, expand
from serving.api.grpc.connection import Stream
from serving.api.grpc.listener import Http2Protocol
from serving.api.grpc.wire import HeaderList, header_block
from serving.api.tokens import Scope, Tokens
from serving.formats.requests import Buffer
from serving.observe.traces import TRACEPARENT, Parent, parent_of
from shard_node.byte_budget import MessageBytes

logger = logging.getLogger(__name__)

ERROR_KIND_METADATA = "shardrank-error-kind"
MAX_DETAILS_BYTES = 4096
MAX_WAITING_MESSAGES = 256
MAX_SMALL_MESSAGE_BYTES = 2**16
"""Of a message that is no ranking request."""
PREFIX_BYTES = 5
CANCELLED_CALL_S = 50e-6
"""What a call costs that the client gives up, in addition to reading it."""
REFUSED_CALL_S, MAX_MESSAGE_S = 2e-3, 0.05
"""What a message that is refused may cost to read, and what one is charged at most: by the wall clock."""
INTERNAL, STOPPING = "internal error; the server's log says more", "the server stops"
IDENTITY = "identity"
KNOWN_CODINGS = ", ".join((IDENTITY, *CODINGS))

_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UNIT_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_CONTENT_TYPE = b"application/grpc"
# The messages' format may follow. `application/grpc-web` is something else.
_CONTENT_TYPES = re.compile(rb"application/grpc(?:[+;]|$)")
_OUTER_SPACE = re.compile(r"\A | \Z")
# Printable ASCII but `%`, which travels as it is.
_UNQUOTED = " !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"
_NOT_COMPRESSED = b"\x00"


class CallHead(NamedTuple):
    """A call's headers; `coding` of compressed messages; why it can't be served, with the HTTP status, or None."""

    path: bytes
    timeout_s: float | None = None
    coding: str = IDENTITY
    authorization: str | None = None
    refusal: tuple[ShardrankError, int] | None = None
    trace_parent: Parent | None = None
    request_id: str = ""


def read_head(request: HeaderList, max_bytes: int) -> CallHead:
    """Read the headers of a call, which may have `max_bytes` as RFC 9113 counts them (section 10.5.1)."""
    headers, refusal, authorization = dict(request.headers), None, None
    timeout, content_type = headers.get(b"grpc-timeout", b""), headers.get(b"content-type", b"")
    parsed = _TIMEOUT.fullmatch(timeout)
    if request.size > max_bytes:
        problem = f"the headers take {request.size} bytes, more than the limit max_header_bytes = {max_bytes}"
        refusal = errors.InvalidRequestError("", problem, kind="header_too_large"), 200
    elif request.problem is not None:
        # RFC 9113, section 8.1.1: a response may say so.
        refusal = errors.malformed("", request.problem), 400
    elif headers[b":method"] != b"POST":
        problem = f"the method is {headers[b':method'].decode('latin-1')!r}; it must be POST"
        refusal = errors.InvalidRequestError("", problem, kind="method_not_allowed"), 405
    elif not _CONTENT_TYPES.match(content_type):
        problem = f"content-type is {content_type.decode('latin-1')!r}; it must be application/grpc"
        refusal = errors.malformed("", problem), 415
    elif timeout and parsed is None:
        problem = f"it is {timeout.decode('latin-1')!r}; it must be digits and a unit"
        refusal = errors.invalid_field("grpc-timeout", problem), 200
    if b"authorization" in headers:
        # Joined, as HTTP has it of headers that come twice: then they are no token.
        values = b", ".join(value for name, value in request.headers if name == b"authorization")
        authorization = values.decode("latin-1")
    timeout_s = int(parsed[1]) * _UNIT_S[parsed[2]] if parsed is not None else None
    coding = headers.get(b"grpc-encoding", b"").decode("latin-1") or IDENTITY
    parent = parent_of(headers, request.headers) if TRACEPARENT in headers else None
    request_id = headers.get(b"x-request-id", b"").decode("latin-1")
    return CallHead(headers.get(b":path", b""), timeout_s, coding, authorization, refusal, parent, request_id)


_BEGINNING = ((b"content-type", _CONTENT_TYPE), (b"grpc-accept-encoding", KNOWN_CODINGS.replace(" ", "").encode()))
RESPONSE_HEAD = header_block(_BEGINNING[:1], status=200)
OK_TRAILERS = header_block(((b"grpc-status", b"0"),), status=None)


def status_block(code: grpc.StatusCode, details: str, kind: str, *, http_status: int | None) -> bytes:
    """Encode the headers that end a call; `http_status` is None where it was sent before, `kind` "" for no error.

    What was shed says when to come again, in milliseconds:
    https://github.com/grpc/proposal/blob/master/A6-client-retries.md.
    """
    trailers = [(b"grpc-status", str(code.value[0]).encode())]
    if details:
        quoted = quote(details[: MAX_DETAILS_BYTES + 1], _UNQUOTED, "utf-8", "replace")
        if len(quoted) > MAX_DETAILS_BYTES:
            # Peers refuse longer trailers. No character takes more than four bytes, of three characters each.
            quoted = quote(details[: MAX_DETAILS_BYTES // 12 - 1] + "...", _UNQUOTED, "utf-8", "replace")
        # A header's value neither begins nor ends with a space (RFC 9113, section 8.2.1).
        trailers.append((b"grpc-message", _OUTER_SPACE.sub("%20", quoted).encode()))
    if kind:
        trailers.append((ERROR_KIND_METADATA.encode(), kind.encode()))
    if kind in (OverloadedError.kind, "buffer_full", "rows_stale"):
        trailers.append((b"grpc-retry-pushback-ms", b"%d" % (1000 * errors.RETRY_AFTER_S)))
    return header_block(trailers if http_status is None else (*_BEGINNING, *trailers), status=http_status)


@dataclass(frozen=True, slots=True)
class GrpcMethod:
    """Answers the calls of one path; a streamed one may have several messages, in either direction.

    `answer` is called when the head of a call has come, and may refuse it by that. What it returns is awaited in a task
    of the call: the bytes of the one answer, or None once it has written those of a streamed call.
    """

    answer: Callable[[GrpcCall], Awaitable[bytes | None]]
    max_message_bytes: int = MAX_SMALL_MESSAGE_BYTES
    scope: Scope | None = None
    is_streamed: bool = False


def streamed(responses: Callable[[GrpcCall], AsyncGenerator[bytes]], scope: Scope | None = None) -> GrpcMethod:
    """Make a method that answers by several messages, until the client, its deadline or the server's end ends it."""

    async def answer(call: GrpcCall) -> None:
        try:
            async with asyncio.timeout(call.time_remaining()), contextlib.aclosing(responses(call)) as messages:
                async for message in messages:
                    await call.write(message)
        except TimeoutError:
            raise DeadlineExceededError("the deadline passed") from None

    return GrpcMethod(answer, scope=scope, is_streamed=True)


@dataclass(slots=True)
class GrpcMethods:
    """The methods of a server by path, such as `/shardrank.v1.RankingService/Rank`, and their calls under way."""

    by_path: Mapping[bytes, GrpcMethod]
    receive_timeout_s: float
    expanding: asyncio.Semaphore
    tokens: Tokens | None = None
    tasks: dict[asyncio.Task[None], GrpcMethod] = field(default_factory=dict)
    accepts_streamed: bool = True

    def end_streamed(self) -> None:
        """End the streamed calls, and accept no more of them."""
        self.accepts_streamed = False
        for task, method in list(self.tasks.items()):
            if method.is_streamed:
                task.cancel()


class GrpcCall(Stream):
    """One call: a stream whose data are messages."""

    def __init__(self, connection: Http2Protocol, stream_id: int, head: CallHead, methods: GrpcMethods) -> None:
        self.head, self.connection, self._stream_id, self._methods = head, connection, stream_id, methods
        method = self._method = None if head.refusal is not None else methods.by_path.get(head.path)
        # Of a message that is not complete: its bytes, and how many have not come, once its length has.
        self._buffer, self._missing = bytearray(), 0
        # With their flags, and compressed as they came: what waits is bounded by the window that way. Last, an error.
        self._messages: deque[tuple[int, bytearray] | ShardrankError] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._on_leave: Callable[[], object] | None = None
        self._has_head = self._has_left = False
        self._working_since = 0.0
        self._ignores_more = method is None
        self._started_at = connection.clock()
        self._bytes = MessageBytes(connection.account)

    def begin(self) -> None:
        """Start the method, or refuse the call."""
        method, methods, head = self._method, self._methods, self.head
        if head.refusal is not None:
            self._refuse(*head.refusal)
            return
        try:
            if method is None:
                raise errors.NotFoundError(f"there is no method {head.path.decode('latin-1')}", kind="no_such_route")
            if method.is_streamed and not methods.accepts_streamed:
                raise UnavailableError(STOPPING, kind="shutting_down")
            if methods.tokens is not None and method.scope is not None:
                methods.tokens.check(head.authorization, method.scope)
            answer = method.answer(self)
        except ShardrankError as error:
            self._refuse(error)
        else:
            task = self.connection.loop.create_task(self._run(answer))
            methods.tasks[task] = method
            task.add_done_callback(methods.tasks.__delitem__)

    def on_data(self, data: memoryview) -> None:
        """Split length-prefixed messages. Of a call that has one message nothing is kept after it."""
        buffer, at, method = self._buffer, 0, self._method
        if self._ignores_more or method is None:
            return
        try:
            self._bytes.charge(len(data))
            buffer += data
            self._missing = 0
            while len(buffer) - at >= PREFIX_BYTES:
                start = at + PREFIX_BYTES
                size = int.from_bytes(buffer[at + 1 : start], "big")
                if size > (allowed := method.max_message_bytes):
                    raise errors.limit_exceeded(
                        "", "max_body_bytes", allowed, size, "bytes in the message", "body_too_large"
                    )
                end, flag = start + size, buffer[at]
                self._missing = max(0, end - len(buffer))
                if self._missing:
                    break
                if end == len(buffer):
                    # It need not be copied.
                    del buffer[:start]
                    message, at = buffer, 0
                    buffer = self._buffer = bytearray()
                else:
                    message, at = buffer[start:end], end
                self._messages.append((flag, message))
                if not method.is_streamed:
                    self._ignore_more()
                    return
                if len(self._messages) > MAX_WAITING_MESSAGES:
                    raise OverloadedError(f"more than {MAX_WAITING_MESSAGES} messages of a call wait for their answers")
            del buffer[:at]
        except ShardrankError as error:
            # Without the frames that it came through: they hold this call, and what it was sent.
            self._discard(error.with_traceback(None))
            return
        if self._messages:
            self._wake()
        if self.receive_window < self._missing:
            self.connection.grant(self._stream_id, self._missing - self.receive_window)

    def on_end(self) -> None:
        """Note that no further message comes."""
        if not self._ignores_more and self._buffer:
            self._messages.append(errors.malformed("", "the call ends before its request message does"))
            self._ignore_more()
        self._wake()

    def on_drained(self) -> None:
        """Let the method go on that waits for the client to read its responses."""
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def on_dropped(self) -> None:
        """Free what came, and end the method, or call back its `watch`: the client has left."""
        self._discard()
        self.has_all = self._has_left = True
        if self._on_leave is not None:
            self.connection.spent(CANCELLED_CALL_S)
            self._on_leave()

    def give_way(self, error: ShardrankError) -> None:
        """Refuse the message, if it is not complete."""
        if self._missing and not self._ignores_more:
            self._discard(error)

    def watch(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the client leaves, instead of the method being cancelled."""
        self._on_leave = callback
        if self._has_left:
            callback()

    def once_sent(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the response is sent, or given up."""
        self.connection.when_sent(self._stream_id, callback)

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None if it has none."""
        timeout_s = self.head.timeout_s
        return None if timeout_s is None else max(0.0, timeout_s - (self.connection.clock() - self._started_at))

    async def receive(self) -> Buffer:
        """Await the message of a call. Raises ShardrankError if none comes in time, or it can't be read."""
        if not self._messages:
            timeout_s = self._methods.receive_timeout_s
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wait()
            except TimeoutError:
                problem = f"the request was not complete after receive_timeout_s = {timeout_s} s"
                raise DeadlineExceededError(problem, kind="request_timeout") from None
        if not self._messages:
            raise errors.malformed("", "the call has no request message")
        return await self._plain()

    async def messages(self) -> AsyncIterator[Buffer]:
        """All messages; other connections come between. Raises ShardrankError for one that can't be read."""
        while True:
            await self._wait()
            while self.connection.is_iteration_used():  # noqa: ASYNC110  # in the next iteration it is not
                await asyncio.sleep(0)
            if not self._messages:
                return
            yield await self._plain()

    async def write(self, message: bytes) -> None:
        """Send one message of several; returns when the client has read it."""
        head = b"" if self._has_head else RESPONSE_HEAD
        self._has_head = True
        self._charge(0.0)
        if not self.connection.send(self._stream_id, head, _prefixed(message)):
            self._drained = self.connection.loop.create_future()
            await self._drained

    async def _run(self, answer: Awaitable[bytes | None]) -> None:
        """Answer the call, with an error if need be. No error, and nothing that it holds, outlives its refusal."""
        connection, task = self.connection, asyncio.current_task()
        assert task is not None
        # Not before: a task that is cancelled before it begins would never await the answer, which has been admitted.
        self._on_leave = task.cancel
        if self._has_left:
            task.cancel()
        try:
            message = await answer
        except ShardrankError as error:
            if isinstance(error, errors.InvalidRequestError) and error.kind != "unknown_id":
                # It was seen while the message was read, in one go.
                self._charge(REFUSED_CALL_S)
            self._refuse(error)
        except asyncio.CancelledError:
            # By the client, who hears nothing of it, or because the server stops.
            self._end(grpc.StatusCode.UNAVAILABLE, STOPPING)
            raise
        except Exception:
            logger.exception("gRPC method %s failed", self.head.path.decode("latin-1"))
            self._end(grpc.StatusCode.INTERNAL, INTERNAL, ShardrankError.kind)
        else:
            if message is None:
                self._end(grpc.StatusCode.OK, "")
            else:
                connection.completed()
                self._bytes.hold(len(message))
                connection.send(self._stream_id, RESPONSE_HEAD, _prefixed(message), OK_TRAILERS)
        finally:
            connection.when_sent(self._stream_id, self._bytes.refund_all)

    def _charge(self, usual_s: float) -> None:
        """Charge the work on the last message, beyond what is usual, since it was given to the method."""
        if self._working_since:
            cost_s = self.connection.clock() - self._working_since - usual_s
            self.connection.spent(min(max(0.0, cost_s), MAX_MESSAGE_S))
            self._working_since = 0.0

    def _refuse(self, error: ShardrankError, http_status: int = 200) -> None:
        if isinstance(error, OverloadedError) and self._method is not None and not self._method.is_streamed:
            # It is not its client's fault that nothing was completed.
            self.connection.completed()
        self._end(grpc.StatusCode[error.grpc_status], str(error), error.kind, http_status)

    def _end(self, code: grpc.StatusCode, details: str, kind: str = "", http_status: int = 200) -> None:
        self._discard()
        block = status_block(code, details, kind, http_status=None if self._has_head else http_status)
        self.connection.send(self._stream_id, b"", b"", block)

    async def _plain(self) -> Buffer:
        """Return the next message as it was before it was compressed, or raise the error that is in its place."""
        if isinstance(self._messages[0], ShardrankError):
            # No variable of this frame may hold it.
            raise self._messages.popleft()  # type: ignore[misc]  # it is one
        flag, compressed = self._messages.popleft()  # type: ignore[misc]  # it is none
        method, connection, size = self._method, self.connection, PREFIX_BYTES + len(compressed)
        message: Buffer = compressed
        assert method is not None
        if method.is_streamed:
            connection.grant(self._stream_id, size)
        if flag:
            coding = self.head.coding
            if flag > 1:
                raise errors.malformed("", f"a message's compressed flag is {flag}; allowed are 0 and 1")
            if coding == IDENTITY:
                raise errors.malformed("", "a message is flagged as compressed, but the call has no grpc-encoding")
            if coding not in CODINGS:
                problem = f"grpc-encoding is {errors.printable(coding, 64)!r}; known are {KNOWN_CODINGS}"
                raise errors.InvalidRequestError("", problem, kind="unknown_coding")
            expanding, max_bytes = self._methods.expanding, method.max_message_bytes
            message = await expand(compressed, max_bytes, self._bytes, connection.spent, expanding)
        if method.is_streamed:
            self._bytes.refund(min(self._bytes.held, PREFIX_BYTES + len(message)))
        self._working_since = connection.clock()
        return message

    def _ignore_more(self) -> None:
        self._ignores_more = True
        self._buffer, self._missing = bytearray(), 0
        self._wake()

    def _discard(self, error: ShardrankError | None = None) -> None:
        self._messages.clear()
        self._bytes.refund_all()
        if error is not None:
            self._messages.append(error)
        self._ignore_more()

    async def _wait(self) -> None:
        if not self._messages and not self.has_all:
            self._waiter = self.connection.loop.create_future()
            await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _prefixed(message: bytes) -> bytes:
    return b"".join((_NOT_COMPRESSED, len(message).to_bytes(4, "big"), message))
