"""The page's building blocks."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.report.fields import Cell, shown
from loadtest.report.markup import Content, Element, element


def figure(title: str, plot: Element, note: str = "", kind: str = "") -> Element:
    """A plot with its title and a sentence on how to read it."""
    notes = [element("figcaption", note)] if note else []
    return element("figure", element("h2", title), element("div", plot, class_="scroll"), *notes, class_=kind or None)


def verdict(valid: bool, good: Content, bad: str, reasons: Sequence[Content]) -> Element:
    """Whether the numbers may be believed, before any of them."""
    if valid:
        return element("div", element("b", "Valid. "), good, class_="verdict valid")
    listed = element("ul", *[element("li", one) for one in reasons])
    return element("div", element("b", "Not valid. "), bad, listed, class_="verdict invalid")


def tile(name: str, cell: Cell, more: str = "", kind: str = "") -> Element:
    """A number of the headline."""
    parts: list[Content] = [
        element("div", name, class_="name"),
        element("div", *shown(cell), class_="figure"),
    ]
    parts += [element("div", more, class_="more")] if more else []
    return element("div", *parts, class_=f"tile {kind}".strip())


def section(title: str, *contents: Content, note: str = "") -> Element:
    """A part of the page under a heading, with a sentence on how to read it."""
    notes = [element("p", note, class_="note")] if note else []
    return element("section", element("h2", title), *contents, *notes)


def folded(title: str, *contents: Content) -> Element:
    """A part that is shown when its title is clicked."""
    return element("details", element("summary", title), *contents)
