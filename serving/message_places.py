"""Where the two parts of a rank message are, found without decoding it.

A part is nearly all of a message, so decoding the rest takes next to no time. Numbers of fields are those of
`ranking.proto`, the encoding is https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

from typing import TypeAlias

Places: TypeAlias = tuple[int, int, int, int, int, int]
"""For `context` and for `candidates`: where the field begins, where its content begins, and where both end.

All are 0 for a part that a message does not have.
"""

_LEN, _VARINT = 2, 0
_CONTEXT, _CANDIDATES = 3 << 3 | _LEN, 4 << 3 | _LEN
_WITH_LENGTH = frozenset((_CONTEXT, _CANDIDATES, *(number << 3 | _LEN for number in (1, 8, 9))))
_NUMBERS = frozenset(number << 3 | _VARINT for number in (2, 5, 6, 7))
# Of a length; messages are below 2 GiB.
_MAX_SHIFT = 28


def places_of(data: bytes) -> Places | None:
    """Walks over the fields of a `RankRequest`.

    Returns:
        The places, or None for whatever is not in order: a part that comes twice, a field that is not known, a message
        that breaks off. The library knows what to do then.
    """
    context = candidates = (0, 0, 0)
    position, end = 0, len(data)
    try:
        while position < end:
            begin, tag = position, data[position]
            position += 1
            if tag in _NUMBERS:
                while data[position] > 127:
                    position += 1
                position += 1
                continue
            if tag not in _WITH_LENGTH:
                return None
            size = data[position]
            position += 1
            if size > 127:
                size, position = _long_size(data, size & 127, position)
            content, position = position, position + size
            if tag == _CONTEXT:
                if context[2]:
                    return None
                context = (begin, content, position)
            elif tag == _CANDIDATES:
                if candidates[2]:
                    return None
                candidates = (begin, content, position)
    except IndexError:
        return None
    return (*context, *candidates) if position == end else None


def without_parts(data: bytes, places: Places) -> bytes:
    """The fields of a message that are not in one of its parts."""
    first, second = sorted(((places[0], places[2]), (places[3], places[5])))
    return data[: first[0]] + data[first[1] : second[0]] + data[second[1] :]


def _long_size(data: bytes, size: int, position: int) -> tuple[int, int]:
    """A length of more than one byte, of which the first is read, and where it ends. Raises IndexError for none."""
    shift = 7
    while True:
        byte = data[position]
        position += 1
        size |= (byte & 127) << shift
        if byte < 128:
            return size, position
        shift += 7
        if shift > _MAX_SHIFT:
            raise IndexError(position)
