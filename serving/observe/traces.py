"""Traces of calls and batches: which are sampled, and their spans, made of recorded times (docs/traces.md).

A call that is not sampled costs one look at its header, or one random number.
"""

from __future__ import annotations

import contextlib
import random
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar

from loader.errors import ShardrankError
from serving.observe.calls import AFTER_BATCH, BEFORE_BATCH, IN_BATCH, BatchTimes, Call, Traced
from serving.observe.metrics import ServingMetrics
from shard_node import tracing

Result = TypeVar("Result")
_Attributes: TypeAlias = dict[str, str | int | float]

TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"
MAX_PARENTS_PER_S = 100.0
"""Calls that are traced because their `traceparent` says so: who sends it decides, and may be anybody."""
_SAMPLED = 1
# https://www.w3.org/TR/trace-context/#traceparent-header: version, trace, parent, flags; a later version may add more.
_PARENT = re.compile(rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.S)
_PRINTABLE = re.compile(rb"[\x20-\x7e]*")
_STAGES = tuple(f"shardrank.{stage}_ms" for stage in (*BEFORE_BATCH, *AFTER_BATCH))
_LOOKUP_STAGES = tuple(f"shardrank.{stage}_ms" for stage in IN_BATCH[1:5])


class Parent(NamedTuple):
    """What a call says of the trace that it belongs to, as it came: not checked."""

    traceparent: bytes
    tracestate: bytes = b""


def parent_of(found: Mapping[bytes, bytes], headers: Iterable[tuple[bytes, bytes]]) -> Parent:
    """Read a call's headers, which have a `traceparent`; a `tracestate` that comes in several is joined."""
    if TRACESTATE not in found:
        return Parent(found[TRACEPARENT])
    return Parent(found[TRACEPARENT], b",".join(value for name, value in headers if name == TRACESTATE))


def read_parent(parent: Parent) -> tuple[tracing.SpanContext, bool] | None:
    """Read the span that a call is a child of, and whether it is sampled. None for a header that is malformed.

    https://www.w3.org/TR/trace-context/#a-traceparent-is-received
    """
    match = _PARENT.fullmatch(parent.traceparent)
    if match is None or (match[1] == b"00" and match[5] is not None):
        return None
    if not int(match[4], 16) & _SAMPLED:
        return tracing.SpanContext(int(match[2], 16), int(match[3], 16)), False
    state = parent.tracestate
    if len(state) > tracing.MAX_STATE_BYTES or _PRINTABLE.fullmatch(state) is None:
        state = b""
    return tracing.SpanContext(int(match[2], 16), int(match[3], 16), state.decode("ascii")), True


@dataclass(eq=False, repr=False)
class Tracer:
    """Decides which calls are traced: those of sampled parents, and of those without a parent a share. Thread-safe.

    As OpenTelemetry's ParentBased(TraceIdRatioBased(share)), but of calls of sampled parents at most
    MAX_PARENTS_PER_S (t + 1) in any t seconds; `note` is told of each one over that.
    """

    sink: tracing.SpanSink
    share: float
    draw: Callable[[], float] = random.random
    clock: Callable[[], float] = time.monotonic
    note: Callable[[tracing.Outcome, int], None] = lambda outcome, count: None

    def __post_init__(self) -> None:
        # A token bucket, full at first.
        self._tokens, self._filled_at, self._lock = MAX_PARENTS_PER_S, self.clock(), threading.Lock()

    def begin(self, parent: Parent | None) -> Traced | None:
        """Return the span of a call; None if it is not sampled."""
        if parent is None or (read := read_parent(parent)) is None:
            return Traced(self.sink, tracing.SpanContext.new()) if self.draw() < self.share else None
        context, is_sampled = read
        if not is_sampled:
            return None
        with self._lock:
            now = self.clock()
            earned = MAX_PARENTS_PER_S * max(0.0, now - self._filled_at)
            self._tokens, self._filled_at = min(MAX_PARENTS_PER_S, self._tokens + earned), now
            is_refused = self._tokens < 1.0
            self._tokens -= not is_refused
        if is_refused:
            self.note("refused", 1)
            return None
        return Traced(self.sink, context.child(), context)


@contextlib.contextmanager
def running_tracer(config: tracing.TraceConfig | None, metrics: ServingMetrics) -> Iterator[Tracer | None]:
    """Give a tracer while the block runs, then send what is left; None without a config. Raises ConfigError."""
    if config is None:
        yield None
        return
    from shard_node.otlp import OtlpSink

    def note(outcome: tracing.Outcome, count: int) -> None:
        metrics.count("trace_spans", outcome, by=count)

    with contextlib.closing(OtlpSink(config, note)) as sink:
        yield Tracer(sink, config.sample_share, note=note)


def traced_batch(sampled: Sequence[Traced]) -> Traced:
    """Begin the span of a batch, in the trace of the first of its sampled calls.

    It and those calls are linked, so that it is found from each of them.
    """
    first = sampled[0].context
    batch = first.child()
    for trace in sampled:
        trace.links += (batch,)
    return Traced(sampled[0].sink, batch, first, tuple(trace.context for trace in sampled), batch.child())


async def traced_lookup(trace: Traced, lookup: Awaitable[Result]) -> Result:
    """Await a batch's lookup; shards that are asked meanwhile are told that they are."""
    assert trace.lookup is not None
    token = tracing.TRACED_LOOKUP.set(tracing.TracedLookup(trace.sink, trace.lookup))
    try:
        return await lookup
    finally:
        tracing.TRACED_LOOKUP.reset(token)


def batch_spans(
    trace: Traced, times: BatchTimes, model: str, version: int, method: str, error: BaseException | None = None
) -> None:
    """Hand out the spans of a batch that has ended: its own, its lookup's, and the dense model's if that ran."""
    assert trace.lookup is not None
    of_model: _Attributes = {"shardrank.model": model, "shardrank.version": version}
    candidates: _Attributes = {"shardrank.candidates": times.num_candidates} if times.num_candidates else {}
    of_batch = of_model | {"shardrank.method": method, "shardrank.requests": times.num_requests} | candidates
    of_lookup = dict(of_model)
    if times.lookup is not None:
        of_lookup |= {name: 1e3 * seconds for name, seconds in zip(_LOOKUP_STAGES, times.seconds()[1:5], strict=True)}
    text = "" if error is None else tracing.error_text(error)
    started_at, ended_at, lookup_at = times.started_at, times.ended_at, times.started_at + times.merge_s
    # A lookup that failed has no time: it lasted until the batch ended.
    pooled_at, failed = (lookup_at + times.lookup_s, "") if times.lookup_s else (ended_at, text)
    batch, links = trace.context, trace.links
    spans = [
        tracing.Span("shardrank.batch", "internal", batch, trace.parent, started_at, ended_at, of_batch, links, text),
        tracing.Span("shardrank.lookup", "internal", trace.lookup, batch, lookup_at, pooled_at, of_lookup, (), failed),
    ]
    if times.rank_s:
        dense, scored_at = batch.child(), pooled_at + times.rank_s
        spans.append(
            tracing.Span("shardrank.dense", "internal", dense, batch, pooled_at, scored_at, of_model | candidates)
        )
    trace.sink.put(*spans)


def call_span(trace: Traced, call: Call, now: float, error: BaseException | None) -> None:
    """Hand out the span of a call that ended now, with what it ended with."""
    attributes: _Attributes = {"shardrank.api": call.api, "shardrank.method": call.method}
    if call.model:
        attributes["shardrank.model"], attributes["shardrank.version"] = call.model, call.version
    if call.batch is not None and call.encoded_at:
        attributes |= {name: 1e3 * seconds for name, seconds in zip(_STAGES, call.around_batch(), strict=True)}
    text = ""
    if error is not None:
        attributes["error.type"] = getattr(error, "kind", type(error).__name__)
        # As OpenTelemetry has it for servers: what a client did wrong is no error of theirs.
        status = error.http_status if isinstance(error, ShardrankError) else 500
        text = tracing.error_text(error) if isinstance(error, Exception) and status >= 500 else ""
    name = f"{call.api} {call.method}"
    trace.sink.put(
        tracing.Span(name, "server", trace.context, trace.parent, call.started_at, now, attributes, trace.links, text)
    )
