"""The protobuf form of a request to flat arrays.

`read_proto` hands packed fields over as bytes: ids, lengths, weights and dense values become arrays by joining chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import chain
from operator import or_
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from loader.fingerprint import fingerprint_strings
from serving.errors import CountMismatchError, InvalidFieldError, InvalidIdError, MalformedRequestError
from serving.form_cache import FormCache
from serving.message_form import FormKey, MessageForm, NotAlike, SeenOnce, form_key
from serving.parse_checks import (
    check_bag_lengths,
    check_bags,
    check_dense,
    check_lookup_size,
    check_num_candidates,
    check_num_ids,
    check_text,
    check_timeout,
    check_top_k,
    check_values,
    dense_matrix,
)
from serving.parse_schema import Part, RequestSchema, part_path
from serving.proto.shardrank.v1 import ranking_wire_pb2
from serving.read_proto import Chunks, LookupMessage, RankMessage, SparseChunks
from serving.request import LookupRequest, RankRequest
from shard_node.bags import Float32Array, Int32Array, Int64Array, KeyedBags
from shard_node.generation import Lease

if TYPE_CHECKING:
    from serving.served_model import ServedModel

Column = TypeVar("Column")
_Parts: TypeAlias = tuple[KeyedBags, Sequence[str], int, Float32Array, Float32Array]


def check_model(model: str) -> None:
    """Raises InvalidFieldError if a message names no model, as an empty message does."""
    if not model:
        raise InvalidFieldError("model", "it is empty; it must be the name of a served model")


class ProtoParser:
    """Parses messages to one model version. Thread-safe."""

    def __init__(self, schema: RequestSchema) -> None:
        self._schema = schema
        self._forms: FormCache[FormKey, MessageForm | SeenOnce | NotAlike] = FormCache()

    def rank(self, message: RankMessage, lease: Lease[ServedModel], now: float) -> RankRequest:
        """Parses a rank request.

        Args:
            message: from `read_rank`.
            lease: on the version that this parser belongs to.
            now: time of arrival on the monotonic clock, in seconds.

        Raises:
            BadRequestError: one of its subclasses, naming the field, the value and what is allowed.
        """
        schema, fields = self._schema, message.fields
        known = self._of_known_form(message)
        bags, texts, num_candidates, context_dense, candidate_dense = known or self._read(message)
        check_values(schema, bags)
        check_dense("context", context_dense)
        check_dense("candidates", candidate_dense)
        request = RankRequest(
            lease=lease,
            bags=bags,
            num_candidates=num_candidates,
            context_dense=context_dense,
            candidate_dense=candidate_dense,
            deadline=now + check_timeout(schema.limits, fields.timeout_ms or None),
            top_k=check_top_k(fields.top_k or None),
            request_id=self._request_id(fields),
            texts=texts,
        )
        if known is None:
            self._learn(message, request)
        return request

    def _read(self, message: RankMessage) -> _Parts:
        """Bags, their strings, number of candidates and dense values of a message of a form that is not known."""
        schema, parts = self._schema, message.parts()
        named: tuple[tuple[Part, SparseChunks], ...] = (("context", parts.context), ("candidates", parts.candidates))
        for part, chunks in named:
            schema.check_names(part, chunks.names, all_needed=True)
        columns = _Columns(schema, schema.keys, (parts.context, parts.candidates), lookup=False)
        dense = _numbers("candidates.dense", parts.candidate_dense, np.float32)
        num_candidates = self._num_candidates(message.fields.num_candidates, columns, dense)
        check_num_candidates(schema.limits, num_candidates)
        bags = columns.bags(schema.bags_per_key(num_candidates))
        check_num_ids(schema, bags.num_values)
        check_bag_lengths(schema, bags)
        context_dense = _numbers("context.dense", parts.context_dense, np.float32)
        if context_dense.size != schema.num_context_dense:
            expected = schema.num_context_dense
            raise CountMismatchError("context.dense", f"{context_dense.size} values, the model takes {expected}")
        candidate_dense = dense_matrix(dense, num_candidates, schema.num_candidate_dense)
        return bags, columns.texts(), num_candidates, context_dense, candidate_dense

    def _of_known_form(self, message: RankMessage) -> _Parts | None:
        key = form_key(message)
        known = None if key is None else self._forms.find(key)
        if not isinstance(known, MessageForm):
            return None
        found = known.read(message.data)
        return None if found is None else (found[0], (), known.num_candidates, found[1], found[2])

    def _learn(self, message: RankMessage, request: RankRequest) -> None:
        """Remembers the form of a message that is good."""
        key = form_key(message)
        if key is None:
            return
        known = self._forms.find(key)
        if known is None:
            self._forms.add(key, SeenOnce())
        elif isinstance(known, SeenOnce):
            form = MessageForm.of(self._schema, message, request)
            if form is None or not self._forms.add(key, form):
                self._forms.add(key, NotAlike())

    def lookup(self, message: LookupMessage, lease: Lease[ServedModel], now: float) -> LookupRequest:
        """Parses a lookup request. Arguments and errors as `rank`."""
        schema, fields = self._schema, message.fields
        given = message.sparse.names
        schema.check_names("", given, all_needed=False)
        keys = np.array(sorted(schema.features.index[name] for name in given), dtype=np.int32)
        columns = _Columns(schema, keys, (message.sparse,), lookup=True)
        bags = columns.bags(None)
        check_bags(schema, bags, lookup=True)
        check_lookup_size(schema, bags)
        deadline = now + check_timeout(schema.limits, fields.timeout_ms or None)
        return LookupRequest(lease, bags, deadline, self._request_id(fields), columns.texts())

    def _request_id(self, fields: ranking_wire_pb2.RankRequest | ranking_wire_pb2.LookupRequest) -> str:
        check_text(self._schema.limits, "routing_key", fields.routing_key)
        return check_text(self._schema.limits, "request_id", fields.request_id)

    def _num_candidates(self, explicit: int, columns: _Columns, dense: Float32Array) -> int:
        if explicit:
            return explicit
        if self._schema.candidate_names:
            return columns.num_bags(self._schema.features.index[self._schema.candidate_names[0]])
        width = self._schema.num_candidate_dense
        return dense.size // width if width else 0


class _Columns:
    """The features of one message in flat order, as joined chunks."""

    def __init__(self, schema: RequestSchema, keys: Int32Array, parts: Sequence[SparseChunks], *, lookup: bool) -> None:
        self._schema = schema
        self._keys = keys
        self._lookup = lookup
        given = list(chain.from_iterable(part.names for part in parts))
        place = dict(zip(given, range(len(given)), strict=True))
        order = [place[schema.names[key]] for key in keys.tolist()]
        ids = _ordered([part.ids for part in parts], order)
        lengths = _ordered([part.lengths for part in parts], order)
        # Most requests bring neither.
        weights, texts = [part.weights for part in parts], [part.texts for part in parts]
        self._weights = _ordered(weights, order) if any(map(any, weights)) else []
        self._texts = _ordered(texts, order) if any(map(any, texts)) else []
        id_bytes = self._checked_sizes("ids", ids, 8)
        length_bytes = self._checked_sizes("lengths", lengths, 4)
        self._weight_bytes = self._checked_sizes("weights", self._weights, 4)
        self._ids = np.frombuffer(_joined(chain.from_iterable(ids)), "<i8")
        self._lengths = np.frombuffer(_joined(chain.from_iterable(lengths)), "<u4").astype(np.int64)
        self._num_integers = id_bytes // 8
        self._num_lengths = length_bytes // 4
        self._num_texts = np.zeros(keys.size, np.int64)
        if self._texts:
            self._num_texts += np.array(list(map(len, self._texts)), np.int64)
        self._num_ids = self._num_integers + self._num_texts
        self._check_id_types()

    def num_bags(self, segment: int) -> int:
        """Bags of one feature: as many as it has lengths, else ids."""
        return int(self._num_lengths[segment]) or int(self._num_ids[segment])

    def bags(self, bags_per_key: Int64Array | None) -> KeyedBags:
        """Flat bags.

        Args:
            bags_per_key: int64 [S], how many bags each feature must have; None to take what is given.

        Raises:
            CountMismatchError: for a feature with another number of bags, or lengths that don't add up to its ids.
        """
        has_lengths = self._num_lengths > 0
        is_one_bag = ~has_lengths & self._schema.features.is_context[self._keys]
        if self._lookup:
            is_one_bag[:] = False
        given = np.where(has_lengths, self._num_lengths, np.where(is_one_bag, 1, self._num_ids))
        if bags_per_key is not None and not np.array_equal(given, bags_per_key):
            segment = int((given != bags_per_key).argmax())
            what = "bags" if is_one_bag[segment] or self._name_part(segment)[1] == "context" else "candidates"
            raise CountMismatchError(
                self._path(segment), f"{int(given[segment])} {what}, expected {int(bags_per_key[segment])}"
            )
        if not self._lengths.size and not is_one_bag.any():
            # One id for each bag, and as many bags as ids.
            return KeyedBags(self._keys, given, np.arange(int(given.sum()) + 1), self._values(), self._flat_weights())
        lengths = self._lengths
        if not has_lengths.all():
            lengths = np.ones(int(given.sum()), dtype=np.int64)
            lengths[np.repeat(has_lengths, given)] = self._lengths
            lengths[np.repeat(is_one_bag, given)] = self._num_ids[is_one_bag]
        bags = KeyedBags.from_lengths(self._keys, given, lengths, np.empty(0, np.int64))
        described = bags.values_per_key()
        if not np.array_equal(described, self._num_ids):
            segment = int((described != self._num_ids).argmax())
            raise CountMismatchError(
                f"{self._path(segment)}.lengths",
                f"they add up to {int(described[segment])}, but there are {int(self._num_ids[segment])} ids",
            )
        return KeyedBags(self._keys, given, bags.offsets, self._values(), self._flat_weights())

    def texts(self) -> list[str]:
        """String ids of all features, in flat order."""
        return list(chain.from_iterable(self._texts))

    def _values(self) -> Int64Array:
        if not self._texts:
            return self._ids
        of_text = np.repeat(self._num_texts > 0, self._num_ids)
        values = np.empty(of_text.size, dtype=np.int64)
        values[of_text] = fingerprint_strings(self.texts())
        values[~of_text] = self._ids
        return values

    def _flat_weights(self) -> Float32Array | None:
        if not self._weights:
            return None
        counts = self._weight_bytes // 4
        given = counts > 0
        if not given.any():
            return None
        weighted = self._schema.is_weighted[self._keys]
        if (given & ~weighted).any():
            segment = int((given & ~weighted).argmax())
            raise InvalidFieldError(
                f"{self._path(segment)}.weights", f"feature {self._name(segment)!r} takes no weights"
            )
        if (counts[given] != self._num_ids[given]).any():
            segment = int((given & (counts != self._num_ids)).argmax())
            raise CountMismatchError(
                f"{self._path(segment)}.weights",
                f"{int(counts[segment])} weights for {int(self._num_ids[segment])} ids",
            )
        weights = np.ones(int(self._num_ids.sum()), dtype=np.float32)
        weights[np.repeat(given, self._num_ids)] = np.frombuffer(_joined(chain.from_iterable(self._weights)), "<f4")
        return weights

    def _check_id_types(self) -> None:
        is_string = self._schema.is_string[self._keys]
        wrong = np.where(is_string, self._num_integers, self._num_texts) > 0
        if wrong.any():
            segment = int(wrong.argmax())
            field, type_name = ("ids", "strings") if is_string[segment] else ("string_ids", "integers")
            raise InvalidIdError(
                f"{self._path(segment)}.{field}", f"ids of {self._name(segment)!r} are {type_name}, not given here"
            )

    def _checked_sizes(self, field: str, chunks: Sequence[Chunks], width: int) -> Int64Array:
        """int64 [S], bytes of each feature's chunks. Raises MalformedRequestError if one breaks off in a number."""
        sizes = [len(own[0]) if len(own) == 1 else sum(map(len, own)) for own in chunks]
        # Widths are powers of two, so one bit tells for all.
        if reduce(or_, map(len, chain.from_iterable(chunks)), 0) % width:
            segment = next(number for number, own in enumerate(chunks) if any(len(chunk) % width for chunk in own))
            raise _broken_chunk(f"{self._path(segment)}.{field}", width)
        return np.array(sizes, np.int64)

    def _name(self, segment: int) -> str:
        return self._schema.names[int(self._keys[segment])]

    def _name_part(self, segment: int) -> tuple[str, Part]:
        name = self._name(segment)
        return name, "" if self._lookup else self._schema.part_of(name)

    def _path(self, segment: int) -> str:
        name, part = self._name_part(segment)
        return part_path(part, f"sparse.{name}")


def _ordered(parts: Sequence[Sequence[Column]], order: Sequence[int]) -> list[Column]:
    """The columns of all parts, joined and put in order."""
    columns = list(chain.from_iterable(parts))
    return [columns[number] for number in order]


def _numbers(path: str, chunks: Iterable[bytes], dtype: type[np.float32]) -> npt.NDArray[np.float32]:
    parts = list(chunks)
    if any(len(part) % 4 for part in parts):
        raise _broken_chunk(path, 4)
    return np.frombuffer(_joined(parts), dtype)


def _joined(chunks: Iterable[bytes]) -> bytearray:
    # Arrays over a bytearray may be written to, which torch wants of memory that it shares.
    return bytearray().join(chunks)


def _broken_chunk(path: str, width: int) -> MalformedRequestError:
    return MalformedRequestError(path, f"a packed field whose length is not a multiple of {width} bytes")
