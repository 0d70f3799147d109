"""Reads a report's page back: its texts, its tables and its numbers."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

Element = ET.Element


def body_of(page: str) -> Element:
    """The page's body, which must be well-formed XML."""
    found = re.search(r"<body>.*</body>", page, re.DOTALL)
    assert found is not None
    return ET.fromstring(found[0])


def with_class(root: Element, *classes: str) -> list[Element]:
    """Elements that have all of the classes."""
    return [element for element in root.iter() if set(classes) <= set((element.get("class") or "").split())]


def text_of(root: Element) -> str:
    """All of its text."""
    return " ".join("".join(root.itertext()).split())


def rows_of(root: Element) -> dict[str, list[str]]:
    """The cells of every table's rows by the row's first cell; of rows alike, the first."""
    rows: dict[str, list[str]] = {}
    for row in root.iter("tr"):
        name, *cells = [text_of(cell) for cell in row]
        rows.setdefault(name, cells)
    return rows


def tiles_of(body: Element) -> dict[str, str]:
    """The numbers of the headline by their names."""
    return {text_of(name): text_of(value) for name, value, *_ in with_class(with_class(body, "tiles")[0], "tile")}


def numbers_of(root: Element) -> list[float]:
    """Every number in the texts, those of charts included."""
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", " ".join(root.itertext()))
    return [float(number.replace(",", "")) for number in found]
