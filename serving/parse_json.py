"""The JSON form of a request, as bytes or as a Python dict of the same shape, to flat arrays.

Bodies with nothing unusual are read without a Python object for each number (`json_arrays`); that refuses nothing, it
only gives up. Others are decoded with the model version's own types and flattened by vector operations. If anything is
not as it should be, `diagnose_json` goes over the body again, slowly, to name the place and the value.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np
from msgspec import UNSET

from serving.diagnose_json import diagnose_lookup, diagnose_rank
from serving.errors import (
    BadRequestError,
    BodyTooLargeError,
    CountMismatchError,
    InvalidFieldError,
    LimitExceededError,
)
from serving.json_arrays import JsonArrays, RankArrays
from serving.json_size import JsonSize
from serving.json_types import JsonTypes, KeyPeek, VersionPeek
from serving.limits import MAX_ID
from serving.parse_checks import (
    check_bags,
    check_dense,
    check_lookup_size,
    check_num_candidates,
    check_text,
    check_timeout,
    check_top_k,
    dense_matrix,
)
from serving.parse_columns import bags_of_columns, weights_of_columns
from serving.parse_schema import RequestSchema
from serving.request import LookupRequest, RankRequest
from shard_node.bags import Float32Array, KeyedBags
from shard_node.generation import Lease

if TYPE_CHECKING:
    from serving.served_model import ServedModel

JsonBody: TypeAlias = bytes | bytearray | Mapping[str, Any]

# What the fast path raises for a body that is not as it should be.
_REFUSALS = (msgspec.MsgspecError, BadRequestError, TypeError, ValueError, OverflowError, RecursionError)


class JsonParser:
    """Parses requests to one model version. Thread-safe."""

    def __init__(self, schema: RequestSchema) -> None:
        self._schema = schema
        types = JsonTypes.of(schema)
        self._types = types
        self._rank_size = JsonSize.of_rank(schema)
        self._lookup_size = JsonSize.of_lookup(schema)
        self._rank = msgspec.json.Decoder(types.rank)
        # Strings are Python objects in any case.
        self._arrays = None if schema.is_string.any() else JsonArrays(schema)
        self._lookup = msgspec.json.Decoder(types.lookup)
        self._context = types.columns(schema, "context")
        self._candidates = types.columns(schema, "candidates")
        self._all = types.columns(schema, "")
        order = [*schema.context_names, *schema.candidate_names]
        self._flat_order = [order.index(name) for name in schema.names]
        self._is_string = schema.is_string.tolist()

    def rank(self, body: JsonBody, lease: Lease[ServedModel], now: float) -> RankRequest:
        """Parses a rank request.

        Args:
            body: JSON text, or a dict of the same shape.
            lease: on the version that this parser belongs to.
            now: time of arrival on the monotonic clock, in seconds.

        Raises:
            BadRequestError: one of its subclasses, naming the field, the value and what is allowed.
        """
        check_body_size(self._schema, body, self._rank_size)
        said = self._plain(body)
        if said is None:
            check_keys(body, self._rank_size)
        try:
            return self._checked(said or self._decoded(body), lease, now)
        except LimitExceededError:
            if said is not None and (said.bags.values < 0).any():
                # Decoding refuses a negative id before anything is counted: whichever way, the error is the same one.
                diagnose_rank(self._schema, body)
            raise
        except _REFUSALS as error:
            diagnose_rank(self._schema, body)
            raise _undiagnosed(error) from error

    def lookup(self, body: JsonBody, lease: Lease[ServedModel], now: float) -> LookupRequest:
        """Parses a lookup request. Arguments and errors as `rank`."""
        check_body_size(self._schema, body, self._lookup_size)
        check_keys(body, self._lookup_size)
        try:
            return self._lookup_fast(body, lease, now)
        except LimitExceededError:
            raise
        except _REFUSALS as error:
            diagnose_lookup(self._schema, body)
            raise _undiagnosed(error) from error

    def _plain(self, body: JsonBody) -> RankArrays | None:
        """What a body says, if it is what `JsonArrays` takes."""
        return None if self._arrays is None or isinstance(body, Mapping) else self._arrays.read(body)

    def _decoded(self, body: JsonBody) -> RankArrays:
        """What any other body says, decoded with the version's own types."""
        schema = self._schema
        decoded: Any = _decode(self._rank, self._types.rank, body)
        candidate_columns = self._candidates(decoded.candidates.sparse)
        num_candidates = _num_candidates(candidate_columns, decoded.candidates.dense)
        check_num_candidates(schema.limits, num_candidates)
        context_columns = [[ids] for ids in self._context(decoded.context.sparse)]
        columns = self._in_flat_order(context_columns, candidate_columns)
        bags, texts = bags_of_columns(schema.keys, columns, self._is_string)
        if decoded.context.weights is not None or decoded.candidates.weights is not None:
            bags = self._weighted(bags, columns, decoded)
        return RankArrays(
            bags,
            num_candidates,
            self._context_dense(decoded.context.dense),
            self._candidate_dense(decoded.candidates.dense, num_candidates),
            timeout_ms=_optional(decoded.timeout_ms),
            top_k=_optional(decoded.top_k),
            version=_optional(decoded.version),
            request_id=decoded.request_id,
            routing_key=decoded.routing_key,
            texts=texts,
        )

    def _checked(self, said: RankArrays, lease: Lease[ServedModel], now: float) -> RankRequest:
        """The request, if its numbers are allowed."""
        schema = self._schema
        limits = schema.limits
        _check_version(said.version, lease)
        check_text(limits, "routing_key", said.routing_key)
        check_num_candidates(limits, said.num_candidates)
        check_bags(schema, said.bags)
        check_dense("context", said.context_dense)
        check_dense("candidates", said.candidate_dense)
        return RankRequest(
            lease=lease,
            bags=said.bags,
            num_candidates=said.num_candidates,
            context_dense=said.context_dense,
            candidate_dense=said.candidate_dense,
            deadline=now + check_timeout(limits, said.timeout_ms),
            top_k=check_top_k(said.top_k),
            request_id=check_text(limits, "request_id", said.request_id),
            texts=said.texts,
        )

    def _lookup_fast(self, body: JsonBody, lease: Lease[ServedModel], now: float) -> LookupRequest:
        schema = self._schema
        decoded: Any = _decode(self._lookup, self._types.lookup, body)
        _check_version(_optional(decoded.version), lease)
        check_text(schema.limits, "routing_key", decoded.routing_key)
        given = self._all(decoded.sparse)
        chosen = [number for number, column in enumerate(given) if column is not UNSET]
        columns = [given[number] for number in chosen]
        keys = np.array(chosen, dtype=np.int32)
        bags, texts = bags_of_columns(keys, columns, [self._is_string[number] for number in chosen])
        if decoded.weights is not None:
            weights = [getattr(decoded.weights, self._types.fields[number], None) for number in chosen]
            given_weights = sum(one is not None for one in msgspec.structs.astuple(decoded.weights))
            if given_weights != sum(one is not None for one in weights):
                raise CountMismatchError("weights", "weights for a feature that is not in sparse")
            bags = _with_weights(bags, columns, weights)
        check_bags(schema, bags, lookup=True)
        check_lookup_size(schema, bags)
        deadline = now + check_timeout(schema.limits, _optional(decoded.timeout_ms))
        request_id = check_text(schema.limits, "request_id", decoded.request_id)
        return LookupRequest(lease, bags, deadline, request_id, texts)

    def _in_flat_order(self, context: Any, candidates: Any) -> list[Any]:
        both = [*context, *candidates]
        return [both[number] for number in self._flat_order]

    def _weighted(self, bags: KeyedBags, columns: list[Any], decoded: Any) -> KeyedBags:
        fields = self._types.fields
        weights: list[Any] = []
        for number, is_context in enumerate(self._schema.features.is_context.tolist()):
            part = decoded.context if is_context else decoded.candidates
            given = None if part.weights is None else getattr(part.weights, fields[number], None)
            weights.append([given] if is_context and given is not None else given)
        return _with_weights(bags, columns, weights)

    def _context_dense(self, values: list[float]) -> Float32Array:
        expected = self._schema.num_context_dense
        if len(values) != expected:
            raise CountMismatchError("context.dense", f"{len(values)} values, the model takes {expected}")
        with np.errstate(over="ignore"):
            return np.array(values, dtype=np.float32)

    def _candidate_dense(self, rows: list[list[float]], num_candidates: int) -> Float32Array:
        width = self._schema.num_candidate_dense
        if rows and (len(rows) != num_candidates or set(map(len, rows)) != {width}):
            raise CountMismatchError("candidates.dense", f"{num_candidates} rows of {width} values are needed")
        with np.errstate(over="ignore"):
            flat = np.fromiter(chain.from_iterable(rows), np.float32)
        return dense_matrix(flat, num_candidates, width)


def peek_version(body: JsonBody) -> int | None:
    """The version that a body asks for, or None. A body that can't be read asks for none: parsing will say why."""
    if isinstance(body, Mapping):
        version = body.get("version")
        in_range = isinstance(version, int) and not isinstance(version, bool) and 1 <= version <= MAX_ID
        return version if in_range else None
    # A key may be written with escapes; without any backslash it stands there as it is.
    # One byte is looked for many times faster than a word, and most bodies have none of it.
    if (b"v" not in body or b'"version"' not in body) and b"\\" not in body:
        return None
    try:
        version = msgspec.json.decode(body, type=VersionPeek).version
    except (msgspec.MsgspecError, RecursionError):
        return None
    return None if version is UNSET else version


def peek_key(body: JsonBody) -> str:
    """The key by which a canary is chosen: `routing_key`, else `request_id`, else "".

    A body that can't be read has none: parsing will say why.
    """
    if isinstance(body, Mapping):
        given = (body.get("routing_key"), body.get("request_id"))
        return next((one for one in given if isinstance(one, str) and one), "")
    if b'"routing_key"' not in body and b'"request_id"' not in body and b"\\" not in body:
        return ""
    try:
        peek = msgspec.json.decode(body, type=KeyPeek)
    except (msgspec.MsgspecError, RecursionError):
        return ""
    return peek.routing_key or peek.request_id


def check_body_size(schema: RequestSchema, body: JsonBody, size: JsonSize) -> None:
    """Raises BodyTooLargeError or TooManyEntriesError; a dict is in memory already.

    A transport refuses a long body earlier; this is for those that come from elsewhere.
    """
    if isinstance(body, Mapping):
        return
    if len(body) > schema.limits.max_body_bytes:
        raise BodyTooLargeError("", "max_body_bytes", schema.limits.max_body_bytes, len(body), "bytes in the body")
    size.check_entries(body)


def check_keys(body: JsonBody, size: JsonSize) -> None:
    """Raises InvalidFieldError for more keys than a request has, each of which would be a Python object."""
    if not isinstance(body, Mapping):
        size.check_keys(body)


def _decode(decoder: msgspec.json.Decoder[Any], body_type: type[Any], body: JsonBody) -> Any:
    if isinstance(body, Mapping):
        return msgspec.convert(body, body_type)
    return decoder.decode(body)


def _with_weights(bags: KeyedBags, columns: list[Any], weights: list[Any]) -> KeyedBags:
    flat = weights_of_columns(bags, columns, weights)
    return KeyedBags(bags.keys, bags.bags_per_key, bags.offsets, bags.values, flat)


def _num_candidates(columns: tuple[list[Any], ...], dense: list[Any]) -> int:
    counts = set(map(len, columns)) or {len(dense)}
    if len(counts) != 1:
        raise CountMismatchError("candidates.sparse", f"features have {sorted(counts)} candidates")
    return counts.pop()


def _check_version(version: int | None, lease: Lease[ServedModel]) -> None:
    """The body was decoded for the version that `peek_version` saw; no other may answer it unnoticed."""
    if version is not None and version != lease.generation.version:
        raise InvalidFieldError("version", f"{version} is asked for, but {lease.generation.version} would answer")


def _optional(value: Any) -> Any:
    return None if value is UNSET else value


def _undiagnosed(error: Exception) -> Exception:
    """What to raise when the slow pass found nothing more exact to say than the fast one did."""
    if isinstance(error, msgspec.MsgspecError) and not isinstance(error, BadRequestError):
        return InvalidFieldError("", str(error))
    # A refusal is passed on as it is; anything else is a defect of the parser, not of the request.
    return error
