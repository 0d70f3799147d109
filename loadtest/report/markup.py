"""Make the page's elements: escaped markup, a document's fields as cells, tables, tiles and sections.

Elements are HTML that is also well-formed XML, so that it can be checked and its plots taken out. A field's element is
`<data value="12.3456" data-of="/latency/p99_ms">12.3</data>`: what is shown may be rounded, the value is not, and
`data-of` is the JSON pointer (RFC 6901) of the field in the result's document.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from pydantic import BaseModel

from loadtest.report import numbers

Element: TypeAlias = ET.Element
Content: TypeAlias = ET.Element | str

# What XML 1.0 has no way to write, not even escaped (w3.org/TR/xml/#charsets): control characters, lone surrogates.
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_VOID = frozenset(
    {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
)


def element(tag: str, *contents: Content, **attributes: str | float | None) -> Element:
    """Make an element.

    Args:
        tag: its name.
        contents: elements and texts, in order.
        attributes: by name; an underscore at the end is dropped (`class_`), others become hyphens (`data_of`). None
            leaves the attribute out. Numbers are written with at most one decimal, the unit of SVG's coordinates.

    Raises:
        ValueError: for an element that HTML writes without an end tag.
    """
    if tag in _VOID:
        raise ValueError(f"tag: {tag} has no end tag in HTML; it can't be made here")
    made = ET.Element(tag)
    for name, value in attributes.items():
        if value is not None:
            made.set(name.rstrip("_").replace("_", "-"), plain(value) if isinstance(value, str) else coordinate(value))
    for content in contents:
        append(made, content)
    return made


def append(parent: Element, content: Content) -> None:
    """Add an element or a text at the end."""
    if not isinstance(content, str):
        parent.append(content)
    elif len(parent):
        parent[-1].tail = (parent[-1].tail or "") + plain(content)
    else:
        parent.text = (parent.text or "") + plain(content)


def plain(text: str) -> str:
    """Replace each character that XML can't hold by U+FFFD."""
    return _NOT_XML.sub("\ufffd", text)


def coordinate(value: float) -> str:
    """Write a number as SVG's attributes have it: at most one decimal."""
    return f"{round(value, 1) + 0.0:.6g}"


def written(root: Element) -> str:
    """Write the element as text."""
    return ET.tostring(root, encoding="unicode", short_empty_elements=False)


Key = str | int


@dataclass(frozen=True, slots=True)
class Cell:
    """What stands in a table's cell: a number is set flush right, its unit after it."""

    content: Content
    number: bool = False
    unit: str = ""


Shown: TypeAlias = Cell | Content
Form: TypeAlias = Literal["text", "ms", "count", "rate", "exact", "plain", "share", "exact_share", "size"]
# How a number is written, and the unit after it. `exact` ones were asked for, not measured; `plain` ones are names.
_FORMS: dict[Form, tuple[Callable[[Any], str], str]] = {
    "ms": (numbers.significant, ""),
    "count": (numbers.count, ""),
    "rate": (numbers.rate, "/s"),
    "exact": (numbers.compact, ""),
    "plain": (str, ""),
    "share": (numbers.share, "%"),
    "exact_share": (numbers.exact_share, "%"),
    "size": (numbers.size, ""),
}


class Shows(NamedTuple):
    """A field as a page shows it: under a name, in a form, with the form's unit after it unless another is given.

    `path` is the field's JSON pointer in the part of the document that is shown, without the slash before it.
    """

    name: str
    form: Form
    path: str
    unit: str | None = None


class Fields:
    """Show fields of a document, each by the keys that lead to it, such as `("latency", "p99_ms")`."""

    def __init__(self, document: BaseModel, *prefix: Key) -> None:
        """Take the whole document, or the part of it that stands at `prefix`."""
        self._document, self._prefix = document, prefix

    def below(self, *keys: Key) -> Fields:
        """Take a part."""
        return Fields(self._document, *self._prefix, *keys)

    def each(self, *keys: Key) -> list[Fields]:
        """Take the parts of a list."""
        return [self.below(*keys, index) for index in range(len(self.value(*keys)))]

    def value(self, *keys: Key) -> Any:
        """Look up a field."""
        found: Any = self._document
        for key in (*self._prefix, *keys):
            found = getattr(found, key) if isinstance(found, BaseModel) and isinstance(key, str) else found[key]
        return found

    def pointer(self, *keys: Key) -> str:
        """Write the JSON pointer of a field."""
        parts = (str(key).replace("~", "~0").replace("/", "~1") for key in (*self._prefix, *keys))
        return "".join(f"/{part}" for part in parts)

    def shown(self, form: Form, *keys: Key, unit: str | None = None) -> Cell:
        """Show a field in a form; a dash for None."""
        value, pointer = self.value(*keys), self.pointer(*keys)
        if form == "text":
            return Cell(element("span", numbers.MISSING if value is None else str(value), data_of=pointer))
        if value is None:
            return Cell(element("span", numbers.MISSING, class_="missing", data_of=pointer), True)
        write, own_unit = _FORMS[form]
        number = element("data", write(value), value=repr(value), data_of=pointer)
        return Cell(number, True, own_unit if unit is None else unit)

    def show(self, one: Shows) -> Cell:
        """Show a field as is said."""
        return self.shown(one.form, *one.path.split("/"), unit=one.unit)

    def text(self, *keys: Key) -> Cell:
        """Show words; a dash for None."""
        return self.shown("text", *keys)

    def row(self, columns: Sequence[Shows]) -> list[Shown]:
        """Show fields beside each other."""
        return [self.show(one) for one in columns]

    def pairs(self, rows: Sequence[Shows]) -> list[tuple[str, Shown]]:
        """Show fields under each other, each with its name."""
        return [(one.name, self.show(one)) for one in rows]


def shown(cell: Cell) -> list[Content]:
    """List a cell's content and its unit."""
    return [cell.content, element("span", f" {cell.unit}", class_="unit")] if cell.unit else [cell.content]


def table(heads: Sequence[str], rows: Sequence[Sequence[Shown]], kind: str = "") -> Element:
    """Make a table with a row of heads; a unit stands after a head's comma, and a plain text in a row is a name."""
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
    """Make a table of names and what they are."""
    body = [element("tr", element("th", name, scope="row"), _cell(one)) for name, one in rows]
    return element("div", element("table", element("tbody", *body), class_="pairs"), class_="scroll")


def figure(title: str, plot: Element, note: str = "", kind: str = "") -> Element:
    """Put a title and a sentence on how to read it around a plot."""
    notes = [element("figcaption", note)] if note else []
    return element("figure", element("h2", title), element("div", plot, class_="scroll"), *notes, class_=kind or None)


def verdict(valid: bool, good: Content, bad: str, reasons: Sequence[Content]) -> Element:
    """Say whether the numbers may be believed."""
    if valid:
        return element("div", element("b", "Valid. "), good, class_="verdict valid")
    listed = element("ul", *[element("li", one) for one in reasons])
    return element("div", element("b", "Not valid. "), bad, listed, class_="verdict invalid")


def tile(name: str, cell: Cell, more: str = "", kind: str = "") -> Element:
    """Make a number of the headline."""
    parts: list[Content] = [
        element("div", name, class_="name"),
        element("div", *shown(cell), class_="figure"),
    ]
    parts += [element("div", more, class_="more")] if more else []
    return element("div", *parts, class_=f"tile {kind}".strip())


def section(title: str, *contents: Content, note: str = "") -> Element:
    """Put a part of the page under a heading, with a sentence on how to read it."""
    notes = [element("p", note, class_="note")] if note else []
    return element("section", element("h2", title), *contents, *notes)


def folded(title: str, *contents: Content) -> Element:
    """Make a part that is shown when its title is clicked."""
    return element("details", element("summary", title), *contents)
