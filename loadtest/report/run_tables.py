"""What the page says of one run in tables; every number of the result is in one of them."""

from __future__ import annotations

from loadtest.load.result import LoadResult
from loadtest.report import numbers
from loadtest.report.fields import Cell, Fields
from loadtest.report.markup import Element, element
from loadtest.report.tables import Shown, pairs, table
from loadtest.workloads.payloads import FORMS

PERCENTILES = ("min_ms", "mean_ms", "p50_ms", "p90_ms", "p99_ms", "p999_ms", "max_ms")


def setup(fields: Fields) -> Element:
    """What was asked, of whom, and how."""
    return pairs(
        [
            ("target", fields.text("target")),
            ("model", fields.text("model")),
            ("workload", fields.text("workload")),
            ("API", fields.text("api")),
            ("ids", _or_own(fields, "ids")),
            ("candidates", _or_own(fields, "candidates")),
            ("requests are", Cell(element("span", FORMS[fields.value("varied")], data_of=fields.pointer("varied")))),
            ("distinct requests", fields.count("requests")),
            ("arrivals", fields.text("arrivals")),
            ("seed", fields.plain("seed")),
            ("rate wanted", fields.exact("rate", unit="/s")),
            ("warm-up, left out", fields.exact("warmup_s", unit="s")),
            ("duration", fields.exact("duration_s", unit="s")),
            ("deadline of goodput", fields.exact("slo_ms", unit="ms")),
            ("timeout", fields.exact("timeout_ms", unit="ms")),
            ("started", fields.text("started_at")),
        ]
    )


def _or_own(fields: Fields, field: str) -> Cell:
    if fields.value(field) is None:
        return Cell(element("span", "the workload's own", data_of=fields.pointer(field)))
    return fields.text(field)


def latencies(fields: Fields) -> Element:
    """Every percentile, three ways."""
    rows: list[list[Shown]] = [
        [name, *[fields.ms(part, field) for field in PERCENTILES]]
        for name, part in (
            ("latency, from the intended send time", "latency"),
            ("the same of all that were due, failures last", "latency_of_due"),
            ("service time, from the actual send", "service"),
        )
    ]
    return table(["ms", "min", "mean", "p50", "p90", "p99", "p99.9", "max"], rows)


def counts(result: LoadResult, fields: Fields) -> Element:
    """Requests by what became of them."""
    rows: list[list[Shown]] = [
        [name, fields.count(field), _percent(fields.value(field), result.due)]
        for name, field in (("due", "due"), ("sent", "sent"), ("answered right", "answered"),
                            ("within the deadline", "within_slo"))
    ]  # fmt: skip
    rows += [
        [f"failed: {kind}", fields.count("errors", kind), _percent(number, result.due)]
        for kind, number in sorted(result.errors.items(), key=lambda one: -one[1])
    ]
    return table(["requests", "number", "of due, %"], rows)


def _percent(part: int, whole: int) -> Cell:
    return Cell(numbers.share(part / whole) if whole else numbers.MISSING, True)


def generator(result: LoadResult, fields: Fields) -> Element:
    """Whether the generator kept up, process by process."""
    own = fields.below("generator")
    rows: list[list[Shown]] = [
        [
            f"process {index}",
            *[own.below("processes", index - 1).share("cpu_share")],
            *[own.below("processes", index - 1).count(field) for field in ("due", "connections")],
            *[own.below("processes", index - 1).ms(field) for field in ("lag_p99_ms", "lag_max_ms")],
        ]
        for index in range(1, len(result.generator.processes) + 1)
    ]
    rows.append(["all together", "", "", "", own.ms("lag_p99_ms"), ""])
    rows.append(["not valid beyond", own.exact_share("max_cpu_share"), "", "", own.ms("max_lag_p99_ms"), ""])
    limits = pairs(
        [
            ("requests in flight, at most", own.count("max_in_flight")),
            ("connections, at most", own.count("max_connections")),
        ]
    )
    heads = ["", "CPU of a core", "due", "connections", "late p99, ms", "late max, ms"]
    return element("div", table(heads, rows), limits)


def marks(result: LoadResult, fields: Fields) -> Element:
    """What happened, with the numbers that it has in the time line."""
    rows: list[list[Shown]] = [
        [str(index + 1), fields.seconds("marks", index, "at_s"), fields.text("marks", index, "label")]
        for index in range(len(result.marks))
    ]
    return table(["mark", "at, s", "what"], rows, "narrow")


def seconds(result: LoadResult, fields: Fields) -> Element:
    """The time line as numbers."""
    rows: list[list[Shown]] = []
    for index, one in enumerate(result.time_line):
        own = fields.below("time_line", index)
        rows.append(
            [
                own.exact("at_s"),
                *[own.count(field) for field in ("due", "ok", "errors")],
                *[own.ms(field) for field in ("p50_ms", "p99_ms")],
                own.count("in_flight"),
                "warm-up" if one.warmup else "",
            ]
        )
    return table(["at, s", "due", "answered", "failed", "p50, ms", "p99, ms", "in flight", ""], rows)


def machine(fields: Fields) -> Element:
    """Where the generator ran, and with what."""
    own = fields.below("machine")
    versions = sorted(fields.value("versions"))
    return pairs(
        [
            ("machine", own.text("name")),
            ("processor", own.text("cpu")),
            ("cores for the generator", own.count("cores")),
            ("memory", own.size("memory_bytes")),
            ("system", own.text("system")),
            *[(name, fields.text("versions", name)) for name in versions],
        ]
    )
