"""From a message's bytes to its fields, with numbers left as they lie on the wire.

A message is read with the types of `ranking_wire.proto`, which hand packed fields over as bytes, with no Python object
for a number. A message that also uses the unpacked encoding, which protobuf allows, shows it as unknown fields and is
first rewritten by the public types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias, TypeVar

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from serving.errors import MalformedRequestError
from serving.message_places import places_of, without_parts
from serving.proto.shardrank.v1 import ranking_pb2, ranking_wire_pb2

_WIRE_RANK, _PUBLIC_RANK = ranking_wire_pb2.RankRequest, ranking_pb2.RankRequest

Wire = TypeVar("Wire", bound=Message)
Chunks: TypeAlias = Sequence[bytes]

# Of a message, beside its packed numbers. Unpacked ones among so many bytes are looked for one by one.
MAX_SEARCHED_BYTES = 32 * 2**10


@dataclass(frozen=True, slots=True)
class SparseChunks:
    """Some features of a message, in its order: everything that is read of them, read once.

    Attributes:
        names: of the features.
        ids, lengths, weights: for each feature, its packed chunks.
        texts: for each feature, its string ids.
        features: what they were read from.
    """

    names: list[str]
    ids: list[Chunks]
    lengths: list[Chunks]
    weights: list[Chunks]
    texts: list[Sequence[str]]
    features: list[ranking_wire_pb2.SparseFeature]

    @classmethod
    def of(cls, sparse: Mapping[str, ranking_wire_pb2.SparseFeature]) -> SparseChunks:
        """Reads a map of features."""
        features = list(sparse.values())
        weights, texts = [one.weights for one in features], [one.string_ids for one in features]
        return cls(
            list(sparse),
            # A slice is a list, and is made faster than a list is made of what can be iterated.
            [feature.ids[:] for feature in features],
            [feature.lengths[:] for feature in features],
            # Most requests have none.
            [own[:] for own in weights] if any(map(len, weights)) else [()] * len(features),
            [own[:] for own in texts] if any(map(len, texts)) else [()] * len(features),
            features,
        )

    def size_bytes(self) -> int:
        """Of all numbers."""
        columns = chain(self.ids, self.lengths, self.weights)
        return sum(map(len, chain.from_iterable(columns)))


@dataclass(frozen=True, slots=True)
class RankParts:
    """The two parts of a rank request.

    Attributes:
        fields: the message; what stands below is read already.
        context, candidates: features.
        context_dense, candidate_dense: packed chunks.
    """

    fields: ranking_wire_pb2.RankRequest
    context: SparseChunks
    candidates: SparseChunks
    context_dense: Chunks
    candidate_dense: Chunks

    @classmethod
    def of(cls, fields: ranking_wire_pb2.RankRequest) -> RankParts:
        """Reads a message."""
        context, candidates = fields.context, fields.candidates
        return cls(
            fields,
            SparseChunks.of(context.sparse),
            SparseChunks.of(candidates.sparse),
            context.dense[:],
            candidates.dense[:],
        )

    def size_bytes(self) -> int:
        """Of all numbers."""
        dense = sum(map(len, self.context_dense)) + sum(map(len, self.candidate_dense))
        return self.context.size_bytes() + self.candidates.size_bytes() + dense

    def holders(self) -> list[Message]:
        """The messages that numbers stand in."""
        return [
            self.fields.context,
            self.fields.candidates,
            *self.context.features,
            *self.candidates.features,
        ]


class RankMessage:
    """A rank request.

    Args:
        data: the message.

    Raises:
        MalformedRequestError: if it is none, as far as one can tell without its parts.

    Attributes:
        data: the message.
        places: where its parts are in there; None if they are not to be found by their places.
        fields: everything but the parts.
    """

    __slots__ = ("_parts", "data", "fields", "places")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.places = places_of(data)
        self._parts: RankParts | None = None
        if self.places is None:
            self.fields = self.parts().fields
        else:
            self.fields = _decoded(without_parts(data, self.places), _WIRE_RANK, _PUBLIC_RANK)

    def parts(self) -> RankParts:
        """Its parts, which are decoded when they are asked for first. Raises MalformedRequestError."""
        if self._parts is None:
            parts = RankParts.of(_decoded(self.data, _WIRE_RANK, _PUBLIC_RANK))
            if _has_unpacked(parts, len(self.data)):
                parts = RankParts.of(_packed(self.data, _WIRE_RANK, _PUBLIC_RANK))
            self._parts = parts
        return self._parts


@dataclass(frozen=True, slots=True)
class LookupMessage:
    """A lookup request.

    Attributes:
        fields: the message; what stands below is read already.
        sparse: features.
    """

    fields: ranking_wire_pb2.LookupRequest
    sparse: SparseChunks

    @classmethod
    def of(cls, fields: ranking_wire_pb2.LookupRequest) -> LookupMessage:
        """Reads a message."""
        return cls(fields, SparseChunks.of(fields.sparse))

    def size_bytes(self) -> int:
        """Of all numbers."""
        return self.sparse.size_bytes()

    def holders(self) -> list[Message]:
        """The messages that numbers stand in."""
        return list(self.sparse.features)


def read_rank(data: bytes) -> RankMessage:
    """Decodes a RankRequest, but for its parts. Raises MalformedRequestError."""
    return RankMessage(data)


def read_lookup(data: bytes) -> LookupMessage:
    """Decodes a LookupRequest. Raises MalformedRequestError."""
    wire, public = ranking_wire_pb2.LookupRequest, ranking_pb2.LookupRequest
    message = LookupMessage.of(_decoded(data, wire, public))
    return LookupMessage.of(_packed(data, wire, public)) if _has_unpacked(message, len(data)) else message


def _has_unpacked(message: RankParts | LookupMessage, size_bytes: int) -> bool:
    """Whether numbers may stand among the unknown fields.

    Each unknown field becomes a Python object when it is looked at, so of those that could be millions only the size
    is: they count towards the message's until they are discarded. That copies the whole message.
    """
    if size_bytes - message.size_bytes() <= MAX_SEARCHED_BYTES:
        return any(len(UnknownFieldSet(holder)) for holder in message.holders())
    size = message.fields.ByteSize()
    message.fields.DiscardUnknownFields()
    return message.fields.ByteSize() != size


def _decoded(data: bytes, wire: type[Wire], public: type[Message]) -> Wire:
    try:
        return wire.FromString(data)
    except DecodeError as error:
        raise _malformed(error, wire, public) from error


def _packed(data: bytes, wire: type[Wire], public: type[Message]) -> Wire:
    try:
        return wire.FromString(public.FromString(data).SerializeToString())
    except DecodeError as error:
        raise _malformed(error, wire, public) from error


def _malformed(error: DecodeError, wire: type[Message], public: type[Message]) -> MalformedRequestError:
    # The decoder names the type that it read, which is no part of the public API.
    reason = str(error).replace(wire.DESCRIPTOR.full_name, public.DESCRIPTOR.full_name)
    return MalformedRequestError("", f"the message is not a {public.DESCRIPTOR.full_name}: {reason}")
