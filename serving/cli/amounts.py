"""Shares and times as people write them: `5%`, `60s`, `2m`."""

from __future__ import annotations

import math

import click

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class Share(click.ParamType):  # type: ignore[type-arg]  # generic in newer releases only
    """Part of a whole, `5%` or `0.05`."""

    name = "SHARE"

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """A number above 0 and below 1; fails for any other."""
        if isinstance(value, float):
            return value
        text = value.strip()
        try:
            share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            share = math.nan
        if not 0 < share < 1:
            self.fail(f"{value!r} is not a share above 0% and below 100%, such as 5% or 0.05.", param, ctx)
        return share


class Duration(click.ParamType):  # type: ignore[type-arg]
    """A time in seconds: `60s`, `2m`, `500ms`, `1h`, or a plain number of seconds."""

    name = "TIME"

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds, at least 0; fails for what is not a time."""
        if isinstance(value, float):
            return value
        text = value.strip()
        number = text.rstrip("hms")
        try:
            seconds = float(number) * _SECONDS[text[len(number) :] or "s"]
        except (ValueError, KeyError):
            seconds = math.nan
        if not 0 <= seconds < math.inf:
            self.fail(f"{value!r} is not a time such as 60s, 2m, 500ms or 1h.", param, ctx)
        return seconds


def human_time(seconds: float) -> str:
    """`45 s`, `3 min 20 s`, `2 h`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    unit, part = ("h", "min") if whole >= 3600 else ("min", "s")
    more, rest = divmod(whole // 60 if unit == "h" else whole, 60)
    return f"{more} {unit} {rest} {part}" if rest else f"{more} {unit}"
