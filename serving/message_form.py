"""Rank messages of a form that was met before are read without decoding them.

Where a message's bytes are the same as another's, but for the numbers in its packed fields, all that is said of these
numbers is the same too: which feature they belong to, how many there are, and in which bags. So the bytes between the
numbers are compared, and the numbers are taken from where they lie. If that fails, its features may only be in another
order, so they are compared one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np

from serving.message_numbers import Numbers, OtherFormError, PartForm, parts_at
from serving.message_places import Places
from serving.parse_schema import RequestSchema
from serving.read_proto import RankMessage
from serving.request import RankRequest
from shard_node.bags import Float32Array, KeyedBags

FormKey: TypeAlias = tuple[Places, int]

# Of the objects of a form and of each of its features, about, as measured.
_FORM_BYTES, _FEATURE_BYTES = 2560, 512


@dataclass(frozen=True, slots=True)
class SeenOnce:
    """In place of a form that was met only once: most of those never come again, and to learn one takes a while."""

    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class NotAlike:
    """In place of a form that can't be told by its structure, or is too large to be kept."""

    size_bytes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class MessageForm:
    """Messages that differ in nothing but their numbers, the order of their features, and `RankMessage.fields`.

    Its arrays are shared by all of them, and not to be changed.

    Attributes:
        structure: the bytes between the numbers, in the order of the first message.
        take_structure: these bytes of a message that has its parts at the same places.
        numbers: where they are in the first message.
        take_ids: of a view of such a message, the ids of each feature, in flat order.
        names: of the features, in flat order.
        parts: each part by itself.
        places: of the parts.
        bags: those of the first message; their values are not kept.
        num_candidates: N.
        num_candidate_dense: Kd.
        size_bytes: of what this takes.
    """

    structure: tuple[bytes, ...]
    take_structure: Callable[[bytes], tuple[bytes, ...]]
    numbers: Numbers
    take_ids: Callable[[memoryview], tuple[memoryview, ...]]
    names: tuple[bytes, ...]
    parts: tuple[PartForm, PartForm]
    places: Places
    bags: KeyedBags
    num_candidates: int
    num_candidate_dense: int
    size_bytes: int

    @classmethod
    def of(cls, schema: RequestSchema, message: RankMessage, request: RankRequest) -> MessageForm | None:
        """Learns the form of a message that was read the long way.

        Returns:
            The form; None for messages of which more differs: those with weights or strings, in several chunks, or
            with anything that is not in the public types.
        """
        places, data, names = message.places, message.data, tuple(name.encode() for name in schema.names)
        if places is None or request.texts or request.bags.weights is not None:
            return None
        ids: dict[bytes, slice] = {}
        try:
            context, candidates = (PartForm.learn(data, part, ids) for part in parts_at(places))
        except OtherFormError:
            return None
        if len(ids) != len(names):
            return None
        numbers = Numbers(ids, context[1], candidates[1])
        take_structure = _taker(_between(places, numbers.places()))
        structure, bags = take_structure(data), request.bags
        # The structure is here twice: as a whole, and part by part.
        objects = _FORM_BYTES + _FEATURE_BYTES * len(names)
        arrays = bags.offsets.nbytes + bags.bags_per_key.nbytes
        return cls(
            structure=structure,
            take_structure=take_structure,
            numbers=numbers,
            take_ids=_taker([ids[name] for name in names]),
            names=names,
            parts=(context[0], candidates[0]),
            places=places,
            bags=KeyedBags(bags.keys, bags.bags_per_key, bags.offsets, np.empty(0, np.int64)),
            num_candidates=request.num_candidates,
            num_candidate_dense=schema.num_candidate_dense,
            size_bytes=2 * sum(map(len, structure)) + objects + arrays,
        )

    def read(self, data: bytes) -> tuple[KeyedBags, Float32Array, Float32Array] | None:
        """Reads a message that has its parts at the same places. Ids are not checked.

        Returns:
            Its bags, and its dense values, float32 [Kc] and [N, Kd]; None if it is not of this form.
        """
        numbers, take_ids = self.numbers, self.take_ids
        if self.take_structure(data) != self.structure:
            found = self._in_other_order(data)
            if found is None:
                return None
            numbers, take_ids = found, _taker([found.ids[name] for name in self.names])
        view, bags = memoryview(data), self.bags
        # Arrays over a bytearray may be written to, which torch wants of memory that it shares.
        values = np.frombuffer(bytearray().join(take_ids(view)), "<i8")
        candidate_dense = _floats(view, numbers.candidate_dense)
        return (
            KeyedBags(bags.keys, bags.bags_per_key, bags.offsets, values),
            _floats(view, numbers.context_dense),
            candidate_dense.reshape(self.num_candidates, self.num_candidate_dense),
        )

    def _in_other_order(self, data: bytes) -> Numbers | None:
        ids: dict[bytes, slice] = {}
        try:
            context, candidates = (
                form.find(data, part, ids) for form, part in zip(self.parts, parts_at(self.places), strict=True)
            )
        except OtherFormError:
            return None
        return Numbers(ids, context, candidates) if len(ids) == len(self.names) else None


def form_key(message: RankMessage) -> FormKey | None:
    """What a form is looked for by: messages that have it may still be of another form."""
    return None if message.places is None else (message.places, message.fields.num_candidates)


def _between(places: Places, numbers: Sequence[slice]) -> list[slice]:
    """What is left of the parts without the numbers."""
    between: list[slice] = []
    for first, end in parts_at(places):
        at = first
        for one in numbers:
            if first <= one.start and one.stop <= end and first < end:
                between.append(slice(at, one.start))
                at = one.stop
        between.append(slice(at, end))
    return between


def _taker(places: Sequence[slice]) -> Callable[[Any], tuple[Any, ...]]:
    if len(places) > 1:
        return itemgetter(*places)
    return lambda data: tuple(data[place] for place in places)


def _floats(view: memoryview, place: slice | None) -> Float32Array:
    return np.empty(0, np.float32) if place is None else np.frombuffer(bytearray(view[place]), "<f4")
