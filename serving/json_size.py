"""Refuses a JSON body that can't be within the limits, by counting its commas and colons before anything is decoded.

Each entry of a list but the first brings a comma, and each key a colon. So many of them outside of strings prove a
request that would be refused anyway, after seconds of decoding. Entries under a key that comes again count as well,
though only the last ones would be used.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from serving.errors import InvalidFieldError, TooManyEntriesError
from serving.limits import RequestLimits
from serving.parse_schema import RequestSchema

_QUOTE, _COMMA, _COLON = (ord(one) for one in '",:')
# Keys of a body besides those that name features.
_OWN_KEYS = 16
# A key may come twice, the last one counts; more often than this is no request.
_MOST_REPEATS = 4


@dataclass(frozen=True, slots=True)
class JsonSize:
    """What a body of one kind, for one model version, may have at most.

    Attributes:
        entries: entries of all lists, and of all objects.
        keys: keys of all objects.
        limits: those that it comes from.
    """

    entries: int
    keys: int
    limits: RequestLimits

    @classmethod
    def of_rank(cls, schema: RequestSchema) -> JsonSize:
        """The most that a rank request may have."""
        limits, dense = schema.limits, schema.num_candidate_dense + 1
        bags = len(schema.candidate_names) * limits.max_candidates
        return cls._of(schema, bags, schema.num_context_dense + limits.max_candidates * dense)

    @classmethod
    def of_lookup(cls, schema: RequestSchema) -> JsonSize:
        """The most that a lookup may have."""
        limits, is_none = schema.limits, schema.features.is_none
        pooled_dims = schema.embedding_dims[~is_none]
        bags = int(is_none.sum()) * limits.max_bags_per_feature
        if pooled_dims.size:
            by_answer = limits.max_lookup_floats // int(pooled_dims.min())
            bags += min(pooled_dims.size * limits.max_bags_per_feature, by_answer)
        return cls._of(schema, bags, 0)

    @classmethod
    def _of(cls, schema: RequestSchema, bags: int, dense: int) -> JsonSize:
        keys = _MOST_REPEATS * (2 * len(schema.names) + _OWN_KEYS)
        # Twice, because weights have the shape of their ids.
        return cls(2 * (schema.limits.max_ids_per_request + bags) + dense + keys, keys, schema.limits)

    def check_entries(self, body: bytes | bytearray) -> None:
        """Raises TooManyEntriesError for more list entries than a request within the limits has.

        Takes no time for a body that is too short for that.
        """
        # The shortest entry is "1,", the shortest key '"":1,'; and what stands in strings only adds to the count.
        if len(body) > 2 * self.entries and _count(body, _COMMA) > self.entries:
            entries = _count_outside_strings(body, _COMMA)
            if entries > self.entries:
                name, allowed = "max_ids_per_request", self.limits.max_ids_per_request
                raise TooManyEntriesError(name, allowed, entries, "list entries", self.entries)

    def check_keys(self, body: bytes | bytearray) -> None:
        """Raises InvalidFieldError for more keys. Takes no time for a body that is too short for that."""
        if len(body) > 4 * self.keys and _count(body, _COLON) > self.keys:
            keys = _count_outside_strings(body, _COLON)
            if keys > self.keys:
                raise InvalidFieldError("", f"{keys} keys; a request to this model has at most {self.keys}")


def _count(body: bytes | bytearray, character: int) -> int:
    return int(np.count_nonzero(np.frombuffer(body, np.uint8) == character))


def _count_outside_strings(body: bytes | bytearray, character: int) -> int:
    """How often a character stands outside of strings. Exact for JSON; anything else is refused in any case."""
    if b"\\" in body:
        # First pairs of backslashes, then escaped quotes: what is left has a quote only where a string begins or ends.
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    text = np.frombuffer(body, np.uint8)
    is_outside = np.cumsum(text == _QUOTE, dtype=np.uint8) & 1 == 0
    return int(np.count_nonzero((text == character) & is_outside))
