"""Traces: what a span is, which lookup's shards are asked for theirs, and where spans go.

A span is a record of times that are over, and is made only for calls that are sampled. Nothing here imports
OpenTelemetry: `shard_node.otlp` does, which `shard_node.trace_export` imports once spans shall go somewhere.
docs/traces.md is the whole.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Literal, NamedTuple, Protocol, TypeAlias, TypeVar

Attributes: TypeAlias = Mapping[str, str | int | float]
Outcome: TypeAlias = Literal["exported", "failed", "dropped", "refused"]
Result = TypeVar("Result")

MAX_STATE_BYTES = 512
"""Of a `tracestate`; a longer one is not passed on, as W3C's Trace Context allows."""
MAX_ERROR_CHARACTERS = 512


class SpanContext(NamedTuple):
    """Names a span of a sampled trace: ids of 16 and 8 bytes, above 0, and the trace's `tracestate`."""

    trace_id: int
    span_id: int
    state: str = ""

    @classmethod
    def new(cls) -> SpanContext:
        """Draw the first span of a trace."""
        return cls(random.getrandbits(128) or 1, random.getrandbits(64) or 1)

    def child(self) -> SpanContext:
        """Draw another span of the same trace."""
        return SpanContext(self.trace_id, random.getrandbits(64) or 1, self.state)


class Span(NamedTuple):
    """What was done, from when to when.

    Attributes:
        kind: `server` has its parent in another process, and `client` its children.
        began, ended: monotonic seconds.
        links: spans that it has to do with, of this trace or another.
        error: what went wrong; "" if nothing did.
    """

    name: str
    kind: Literal["server", "client", "internal"]
    context: SpanContext
    parent: SpanContext | None
    began: float
    ended: float
    attributes: Attributes
    links: Sequence[SpanContext] = ()
    error: str = ""


class SpanSink(Protocol):
    """Takes spans, from any thread, and waits for nobody."""

    def put(self, *spans: Span) -> None:
        """Take spans, and never raise: those that there is no room for, or that fail, are dropped and counted.

        It is called where an answer would be lost with it, or a count.
        """

    def close(self) -> None:
        """Send what was taken, within a limit of time. Idempotent."""


class TracedLookup(NamedTuple):
    """A lookup that is traced, for whoever asks shards for it.

    Attributes:
        sink: takes the spans of the calls.
        context: of the lookup, which they are children of.
    """

    sink: SpanSink
    context: SpanContext

    async def ask(self, call: Callable[[SpanContext], Awaitable[Result]], attributes: Attributes) -> Result:
        """Make a call to a shard node, which is told the context of the call's own span."""
        own, began, error = self.context.child(), time.monotonic(), ""
        try:
            return await call(own)
        except BaseException as failure:
            error = error_text(failure)
            raise
        finally:
            ended = time.monotonic()
            self.sink.put(Span("shardrank.ask", "client", own, self.context, began, ended, attributes, (), error))


TRACED_LOOKUP: ContextVar[TracedLookup | None] = ContextVar("TRACED_LOOKUP", default=None)
"""The lookup that is under way, if its trace is sampled; calls to its shards are made in copies of this context."""


def error_text(error: BaseException) -> str:
    """Say what went wrong: its kind and message."""
    kind = getattr(error, "kind", type(error).__name__)
    return f"{kind}: {error}"[:MAX_ERROR_CHARACTERS]
