"""Where the packed numbers of a rank message lie, for messages that are made of nothing but these and their names.

The encoding is https://protobuf.dev/programming-guides/encoding/. A map comes as one entry for each feature, in any
order: some libraries take the same one each time, others another one for each message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from serving.message_places import Places

# Field numbers 1 to 4, each with the wire type of what has a length.
_FIRST, _SECOND, _THIRD, _FOURTH = 0x0A, 0x12, 0x1A, 0x22
_TAGS = frozenset((_FIRST, _SECOND, _THIRD, _FOURTH))


class OtherFormError(Exception):
    """A message of which more differs than numbers, or that is not of the form it was taken for."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """Where they are.

    Attributes:
        ids: of each feature, by its name, in the order of the message.
        context_dense: or None if there is none.
        candidate_dense: likewise.
    """

    ids: Mapping[bytes, slice]
    context_dense: slice | None
    candidate_dense: slice | None

    def places(self) -> list[slice]:
        """All of them, from first to last."""
        dense = [one for one in (self.context_dense, self.candidate_dense) if one is not None]
        return sorted((*self.ids.values(), *dense), key=lambda one: (one.start, one.stop))


class _Entry(NamedTuple):
    """A field of a part: one feature with its ids, or the dense values. The name of the latter is None."""

    name: bytes | None
    num_bytes: int
    tail: bytes


@dataclass(frozen=True, slots=True)
class PartForm:
    """A part of a message without its numbers, in any order of its features.

    Attributes:
        entries: by the bytes in front of their numbers.
        head_lengths: of these bytes.
    """

    entries: Mapping[bytes, _Entry]
    head_lengths: tuple[int, ...]

    @classmethod
    def learn(cls, data: bytes, part: tuple[int, int], ids: dict[bytes, slice]) -> tuple[PartForm, slice | None]:
        """Learns a part of a valid message.

        Args:
            data: the message.
            part: where the part begins and ends.
            ids: is given the ids of its features.

        Returns:
            The form, and where the dense values are.

        Raises:
            OtherFormError: for a part with weights, strings, several chunks, or what is not in the public types.
        """
        dense: slice | None = None
        entries: dict[bytes, _Entry] = {}
        begin = part[0]
        for tag, place in _fields(data, *part):
            name, numbers = _ids_of(data, place) if tag == _FIRST else (None, place)
            if name is not None and name not in ids:
                ids[name] = numbers
            elif tag == _SECOND and dense is None:
                dense = numbers
            else:
                raise OtherFormError
            tail = data[numbers.stop : place.stop]
            entries[data[begin : numbers.start]] = _Entry(name, numbers.stop - numbers.start, tail)
            begin = place.stop
        return cls(entries, tuple({len(head) for head in entries})), dense

    def find(self, data: bytes, part: tuple[int, int], ids: dict[bytes, slice]) -> slice | None:
        """The numbers of a part of this form. Arguments and errors as `learn`; the message need not be valid."""
        position, end = part
        dense: slice | None = None
        known, num_ids = self.entries.get, len(ids)
        while position < end:
            for length in self.head_lengths:
                entry = known(data[position : position + length])
                if entry is not None:
                    break
            else:
                raise OtherFormError
            name, size, tail = entry
            first = position + length
            stop = first + size
            position = stop + len(tail)
            if tail and data[stop:position] != tail:
                raise OtherFormError
            if name is None:
                dense = slice(first, stop)
            else:
                ids[name] = slice(first, stop)
        if position != end or len(ids) - num_ids + (dense is not None) != len(self.entries):
            raise OtherFormError
        return dense

    def size_bytes(self) -> int:
        """Of what this takes."""
        return sum(len(head) + len(entry.tail) for head, entry in self.entries.items())


def parts_at(places: Places) -> tuple[tuple[int, int], tuple[int, int]]:
    """Where the contents of the context and of the candidates begin and end."""
    return (places[1], places[2]), (places[4], places[5])


def _ids_of(data: bytes, entry: slice) -> tuple[bytes, slice]:
    """A feature's name and where its ids are; if it has none, where they would be."""
    fields = list(_fields(data, entry.start, entry.stop))
    if [tag for tag, _ in fields] != [_FIRST, _SECOND]:
        raise OtherFormError
    name, feature = data[fields[0][1]], fields[1][1]
    numbers = list(_fields(data, feature.start, feature.stop))
    by_tag = dict(numbers)
    # Lengths stay part of the form.
    if len(by_tag) != len(numbers) or not by_tag.keys() <= {_FIRST, _SECOND}:
        raise OtherFormError
    return name, by_tag.get(_FIRST, slice(feature.start, feature.start))


def _fields(data: bytes, start: int, stop: int) -> Iterator[tuple[int, slice]]:
    """Tag and content of each field of a message that is known to be valid."""
    while start < stop:
        tag = data[start]
        if tag not in _TAGS:
            raise OtherFormError
        size, start = _size_at(data, start + 1)
        yield tag, slice(start, start + size)
        start += size


def _size_at(data: bytes, position: int) -> tuple[int, int]:
    """A length, and where it ends. Raises OtherFormError if the message breaks off, or for one that none can have."""
    size = shift = 0
    for byte in data[position : position + 5]:
        position += 1
        size |= (byte & 127) << shift
        if byte < 128:
            return size, position
        shift += 7
    raise OtherFormError
