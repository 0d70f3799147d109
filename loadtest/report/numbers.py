"""Numbers as a person reads them. Digits that were not measured are not shown; nothing is rounded to 0% or 100%."""

from __future__ import annotations

import math

MISSING = "–"


def significant(value: float) -> str:
    """At least three significant digits, all of those before the point: 0.482, 12.3, 1,234."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 99.95:
        return f"{value:,.0f}"
    if size >= 1e-4:
        decimals = 2 - math.floor(math.log10(size))
        shown = f"{value:.{decimals}f}"
        # 9.996 has two decimals as it stands, and is 10.0.
        return f"{value:.{decimals - 1}f}" if abs(float(shown)) >= 10.0 ** (3 - decimals) else shown
    return f"{value:.2e}"


def rate(value: float) -> str:
    """Of a second: as it is if whole, else four significant digits."""
    if value == int(value):
        return f"{value:,.0f}"
    if value >= 999.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 99.995 else significant(value)


def count(value: float) -> str:
    """With separators of thousands."""
    return f"{value:,.0f}"


def share(value: float) -> str:
    """In percent, without the sign: two decimals, or two digits of what is missing to 0 or 100 where that is less.

    Above 100%, one decimal.
    """
    if value in (0.0, 1.0) or value > 1:
        return f"{100 * value:.1f}".removesuffix(".0")
    rest = min(value, 1 - value)
    decimals = 2 if rest >= 1e-4 else min(12, 1 - math.floor(math.log10(rest)) - 2)
    return f"{100 * value:.{decimals}f}"


def exact_share(value: float) -> str:
    """In percent, without the sign: one that was asked for, not measured."""
    return compact(100 * value)


def ratio(value: float) -> str:
    """One thing to another: three significant digits, at least two decimals."""
    return f"{value:.2f}" if value >= 0.995 else significant(value)


def size(value: float) -> str:
    """Bytes in GiB or MiB, with the unit."""
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"


def compact(value: float) -> str:
    """For ticks: no more digits than it has, thousands separated."""
    shown = f"{value:,.10f}".rstrip("0").rstrip(".")
    return "0" if shown in ("-0", "") else shown


def percentile_name(value: float) -> str:
    """0.999 is 99.9%."""
    nines = max(0, round(-math.log10(max(1 - value, 1e-15))) - 2)
    return f"{100 * value:.{nines}f}%"
