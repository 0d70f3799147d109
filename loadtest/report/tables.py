"""Tables: numbers flush right under their heads, units in the head or after the number."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.report.fields import Cell, shown
from loadtest.report.markup import Content, Element, element

Shown = Cell | Content


def table(heads: Sequence[str], rows: Sequence[Sequence[Shown]], kind: str = "") -> Element:
    """A table with a row of heads.

    Args:
        heads: names of the columns; a unit stands after a comma.
        rows: of cells; a plain text is a name.
        kind: class of the table.
    """
    body = [element("tr", *[_cell(one) for one in row]) for row in rows]
    # A column is as flush as its cells: a head over numbers stands on the right as they do.
    flush = [any(isinstance(row[index], Cell) and row[index].number for row in rows) for index in range(len(heads))]  # type: ignore[union-attr]
    top = [element("th", head, class_="number" if right else None) for head, right in zip(heads, flush, strict=True)]
    made = element("table", element("thead", element("tr", *top)), element("tbody", *body), class_=kind or None)
    return element("div", made, class_="scroll")


def _cell(one: Shown) -> Element:
    if not isinstance(one, Cell):
        return element("td", one)
    return element("td", *shown(one), class_="number" if one.number else None)


def pairs(rows: Sequence[tuple[str, Shown]]) -> Element:
    """Names with what they are, one under the other."""
    body = [element("tr", element("th", name, scope="row"), _cell(one)) for name, one in rows]
    return element("div", element("table", element("tbody", *body), class_="pairs"), class_="scroll")
