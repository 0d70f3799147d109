"""Elements of the page, escaped: HTML that is also well-formed XML, so that it can be checked and its plots taken out.

Elements without content are written with an end tag (`<td></td>`), so no void element of HTML (`br`, `meta`) may be
made here.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import TypeAlias

Element: TypeAlias = ET.Element
Content: TypeAlias = ET.Element | str

# What XML 1.0 has no way to write, not even escaped (w3.org/TR/xml/#charsets): control characters, lone surrogates.
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_VOID = frozenset(
    {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
)


def element(tag: str, *contents: Content, **attributes: str | float | None) -> Element:
    """Makes an element.

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
    """Adds an element or a text at the end."""
    if not isinstance(content, str):
        parent.append(content)
    elif len(parent):
        parent[-1].tail = (parent[-1].tail or "") + plain(content)
    else:
        parent.text = (parent.text or "") + plain(content)


def plain(text: str) -> str:
    """The text, with U+FFFD for each character that XML can't hold."""
    return _NOT_XML.sub("\ufffd", text)


def coordinate(value: float) -> str:
    """A number as SVG's attributes have it: at most one decimal."""
    return f"{round(value, 1) + 0.0:.6g}"


def written(root: Element) -> str:
    """The element as text."""
    return ET.tostring(root, encoding="unicode", short_empty_elements=False)
