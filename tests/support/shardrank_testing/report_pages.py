"""Reads a report's page back: its fields, its plots and its texts."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from typing import Any

from pydantic import BaseModel

Element = ET.Element


def body_of(page: str) -> Element:
    """The page's body, read as XML, which it must be."""
    found = re.search(r"<body>.*</body>", page, re.DOTALL)
    assert found is not None
    return ET.fromstring(found[0])


def plots_of(body: Element) -> dict[str, Element]:
    """The pictures by what they show; of those alike, the first."""
    found: dict[str, Element] = {}
    for svg in body.iter("svg"):
        found.setdefault(str(svg.get("aria-label")), svg)
    return found


def with_class(root: Element, tag: str, *classes: str) -> list[Element]:
    """Elements that have all of the classes."""
    return [one for one in root.iter(tag) if set(classes) <= set((one.get("class") or "").split())]


def text_of(root: Element) -> str:
    """All of its text."""
    return " ".join("".join(root.itertext()).split())


def at_pointer(document: dict[str, Any], pointer: str) -> Any:
    """The value at a JSON pointer."""
    found: Any = document
    for part in pointer.removeprefix("/").split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        found = found[int(key)] if isinstance(found, list) else found[key]
    return found


def leaves(document: Any, pointer: str = "") -> dict[str, Any]:
    """Every value of a document that has no parts, by its pointer."""
    if isinstance(document, dict):
        parts = [(str(key).replace("~", "~0").replace("/", "~1"), value) for key, value in document.items()]
    elif isinstance(document, list):
        parts = [(str(index), value) for index, value in enumerate(document)]
    else:
        return {pointer: document}
    return {key: value for name, part in parts for key, value in leaves(part, f"{pointer}/{name}").items()}


def document_of(result: BaseModel) -> dict[str, Any]:
    """As it is in the file."""
    return result.model_dump(mode="json")


class Tags(HTMLParser):
    """A browser's view of the page: which elements are opened and closed, and their attributes."""

    VOID = frozenset({"meta"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)
