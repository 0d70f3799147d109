"""A document's fields as the page shows them: each with the value it has in the document, and where that stands.

A field's element is `<data value="12.3456" data-of="/latency/p99_ms">12.3</data>`: what is shown may be rounded, the
value is not, and `data-of` is the JSON pointer (RFC 6901) of the field in the result's document.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from loadtest.report import numbers
from loadtest.report.markup import Content, Element, element

Key = str | int


@dataclass(frozen=True, slots=True)
class Cell:
    """What stands in a table's cell.

    Attributes:
        content: text or element.
        number: whether it is set flush right.
        unit: shown after it.
    """

    content: Content
    number: bool = False
    unit: str = ""


class Fields:
    """Reads fields of a document by their keys, such as `fields.ms("latency", "p99_ms")`."""

    def __init__(self, document: BaseModel, *prefix: Key) -> None:
        """Of the whole document, or of the part of it that stands at `prefix`."""
        self._document, self._prefix = document, prefix

    def below(self, *keys: Key) -> Fields:
        """Those of a part."""
        return Fields(self._document, *self._prefix, *keys)

    def value(self, *keys: Key) -> Any:
        """A field's value."""
        found: Any = self._document
        for key in (*self._prefix, *keys):
            found = getattr(found, key) if isinstance(found, BaseModel) and isinstance(key, str) else found[key]
        return found

    def pointer(self, *keys: Key) -> str:
        """Where it stands."""
        parts = (str(key).replace("~", "~0").replace("/", "~1") for key in (*self._prefix, *keys))
        return "".join(f"/{part}" for part in parts)

    def _number(self, keys: tuple[Key, ...], form: Any, unit: str) -> Cell:
        value = self.value(*keys)
        if value is None:
            return Cell(element("span", numbers.MISSING, class_="missing", data_of=self.pointer(*keys)), True)
        return Cell(self._data(keys, value, form(value)), True, unit)

    def _data(self, keys: tuple[Key, ...], value: float, text: str) -> Element:
        return element("data", text, value=repr(value), data_of=self.pointer(*keys))

    def ms(self, *keys: Key, unit: str = "") -> Cell:
        """Milliseconds."""
        return self._number(keys, numbers.significant, unit)

    def seconds(self, *keys: Key, unit: str = "") -> Cell:
        """Seconds, below 0 if before the beginning."""
        return self._number(keys, numbers.significant, unit)

    def count(self, *keys: Key, unit: str = "") -> Cell:
        """A whole number."""
        return self._number(keys, numbers.count, unit)

    def rate(self, *keys: Key, unit: str = "/s") -> Cell:
        """Of a second."""
        return self._number(keys, numbers.rate, unit)

    def exact(self, *keys: Key, unit: str = "") -> Cell:
        """As it is: what was asked for, not measured."""
        return self._number(keys, numbers.compact, unit)

    def plain(self, *keys: Key, unit: str = "") -> Cell:
        """A whole number that is a name and not an amount, without separators."""
        return self._number(keys, str, unit)

    def share(self, *keys: Key) -> Cell:
        """In percent."""
        return self._number(keys, numbers.share, "%")

    def exact_share(self, *keys: Key) -> Cell:
        """In percent, what was asked for."""
        return self._number(keys, numbers.exact_share, "%")

    def size(self, *keys: Key) -> Cell:
        """Bytes."""
        return self._number(keys, numbers.size, "")

    def text(self, *keys: Key) -> Cell:
        """Words; a dash for None."""
        value = self.value(*keys)
        return Cell(element("span", numbers.MISSING if value is None else str(value), data_of=self.pointer(*keys)))


def shown(cell: Cell) -> list[Content]:
    """A cell's content with its unit, for use outside of a table."""
    return [cell.content, element("span", f" {cell.unit}", class_="unit")] if cell.unit else [cell.content]
