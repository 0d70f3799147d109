"""The protobuf wire format, read field by field within a budget and written without objects for numbers.

Source: https://protobuf.dev/programming-guides/encoding/. The library's parser makes an object of everything in a
message before it can be counted, and holds the interpreter's lock meanwhile: 16 KB of compressed empty messages become
eight million objects. This one walks over tags, counts what it meets, and makes nothing of numbers and unknown fields.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy.typing as npt
from google.protobuf.message import Message as Generated

from serving.errors import InvalidRequestError, limit_exceeded, malformed
from serving.formats.requests import Buffer

VARINT, LENGTH = 0, 2
_FIXED_BYTES = {1: 8, 5: 4}
# Of fields that are not varints: double, float, fixed64, fixed32, string, message, bytes, sfixed32, sfixed64.
_WIRE_TYPES = {1: 1, 2: 5, 6: 1, 7: 5, 9: LENGTH, 11: LENGTH, 12: LENGTH, 15: 5, 16: 1}
MAX_VARINT_BYTES = 10
MAX_TEXT_BYTES = 4096


class ProtobufMessage:
    """One message of a type, of which `max_fields` may be read, those of all messages inside included."""

    __slots__ = ("_left", "_max_fields", "_name", "data", "view")

    def __init__(self, body: Buffer, name: str, max_fields: int) -> None:
        self.data = bytes(body) if isinstance(body, memoryview) else body
        self.view = memoryview(self.data)
        self._name = name
        self._left = self._max_fields = max_fields

    def fields(self, start: int = 0, end: int | None = None) -> Iterator[tuple[int, int, int]]:
        """Walk over the fields between two positions.

        Yields the tag (`number << 3 | wire type`), and where the content begins and ends; for a varint its value as an
        unsigned integer, and 0.
        """
        data, at, end = self.data, start, len(self.data) if end is None else end
        while at < end:
            self._left -= 1
            if self._left < 0:
                limit = self._max_fields
                raise limit_exceeded("", "max_message_fields", limit, f"more than {limit}", "fields in the message")
            tag = data[at]
            at += 1
            if tag > 127:
                tag, at = self._varint(at - 1, end)
            kind = tag & 7
            if not 8 <= tag < 1 << 32:
                raise self.malformed("a field has a number that there is not")
            if kind == LENGTH:
                size, at = (data[at], at + 1) if at < end and data[at] < 128 else self._varint(at, end)
                stop = at + size
                if stop > end:
                    raise self.malformed(f"field {tag >> 3} is longer than what is left")
                yield tag, at, stop
                at = stop
            elif kind == VARINT:
                value, at = self._varint(at, end)
                yield tag, value, 0
            elif kind in _FIXED_BYTES:
                stop = at + _FIXED_BYTES[kind]
                if stop > end:
                    raise self.malformed(f"it ends within field {tag >> 3}")
                yield tag, at, stop
                at = stop
            else:
                raise self.malformed(f"field {tag >> 3} has wire type {kind}; groups are not taken")

    def entry(self, start: int, end: int, field: str) -> tuple[str, tuple[int, int]]:
        """Read an entry of a map to messages: its key, and where its value lies. The library would merge two values."""
        key, value = "", None
        for tag, at, stop in self.fields(start, end):
            if tag == 1 << 3 | LENGTH:
                key = self.text(at, stop, field)
            elif tag == 2 << 3 | LENGTH:
                if value is not None:
                    raise malformed(field, f"the value of {key[:80]!r} is there twice")
                value = at, stop
        return key, value or (0, 0)

    def text(self, start: int, end: int, field: str) -> str:
        """Decode a text that is no id."""
        if end - start > MAX_TEXT_BYTES:
            raise limit_exceeded(field, "text", MAX_TEXT_BYTES, end - start, "bytes")
        try:
            return self.data[start:end].decode()
        except UnicodeDecodeError as error:
            raise malformed(field, f"it is not UTF-8: {error.reason}") from None

    def varints(self, start: int, end: int) -> Iterator[int]:
        """Read a packed field of varints, as unsigned integers."""
        while start < end:
            value, start = self._varint(start, end)
            yield value

    def malformed(self, problem: str) -> InvalidRequestError:
        """Make the error for bytes that are no such message."""
        return malformed("", f"the message is not a {self._name}: {problem}")

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        """Read a varint of up to 64 bits. Returns it, and where it ends."""
        data, value, shift = self.data, 0, 0
        for position in range(at, min(end, at + MAX_VARINT_BYTES)):
            byte = data[position]
            value |= (byte & 127) << shift
            if byte < 128:
                return value & 0xFFFF_FFFF_FFFF_FFFF, position + 1
            shift += 7
        raise self.malformed("a varint that does not end")


def tags_of(message: type[Generated]) -> dict[int, str]:
    """Names of a message's fields by tag; numbers that are repeated have two, because they may be packed or not."""
    tags = {}
    for field in message.DESCRIPTOR.fields:
        tags[field.number << 3 | _WIRE_TYPES.get(field.type, VARINT)] = field.name
        if field.is_repeated:
            tags[field.number << 3 | LENGTH] = field.name
    return tags


def signed(value: int) -> int:
    """Return an int64 from the unsigned integer that a varint gives."""
    return value - (1 << 64) if value >> 63 else value


def encode_varint(value: int) -> bytes:
    """Encode an unsigned integer."""
    digits = bytearray()
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def encode_field(number: int, content: bytes | memoryview) -> bytes:
    """Encode a field that has a length; nothing for an empty one, as proto3 has it."""
    if not len(content):
        return b""
    return b"".join((encode_varint(number << 3 | LENGTH), encode_varint(len(content)), content))


def encode_array(number: int, values: npt.NDArray[Any], dtype: str) -> bytes:
    """Encode a packed field of fixed-width numbers, such as `<f4`."""
    return encode_field(number, packed_bytes(values, dtype))


def packed_bytes(values: npt.NDArray[Any], dtype: str) -> bytes:
    """Return the content of a packed field of fixed-width numbers, such as `<f4`."""
    return values.astype(dtype, copy=False).tobytes()
