"""Why a JSON request was not taken: a second pass over the text that names the first place that is wrong.

Runs only for text that `json_reader` did not take, of at most `max_json_bytes`. What is too much is refused by its
count, before it is gone over. Lists are gone over by the interpreter's own loops, so that a wrong value at the end of a
million costs no more than one at their beginning.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import msgspec
import numpy as np

from serving.errors import (
    BadRequestError,
    CountMismatchError,
    InvalidFieldError,
    InvalidIdError,
    MalformedRequestError,
    MissingFeatureError,
)
from serving.formats.checks import (
    MAX_FLOAT32,
    TextField,
    check_bags_of_feature,
    check_num_candidates,
    check_text,
    has_lone_surrogate,
    is_finite_number,
)
from serving.formats.json_text import count_above, many_lists
from serving.formats.requests import Method
from serving.formats.schema import Part, RequestSchema, part_path
from serving.limits import MAX_ID, RequestLimits

# The slow decoder tells the field of what is not quite JSON (NaN, integers of thousands of digits, lone surrogates); in
# longer texts, a quick one tells the byte.
MAX_SLOW_BYTES = 2**18
# A request has seven objects, and twice as many keys as features. Somewhat more are decoded, to name the wrong one.
MAX_OBJECTS, MAX_KEYS = 64, 16_384
_BRACE, _COLON = ord("{"), ord(":")
_TEXTS: tuple[TextField, ...] = ("request_id", "routing_key")
_OPTIONS = ("timeout_ms", "version", *_TEXTS)
_KEYS: dict[Method, tuple[str, ...]] = {
    "rank": ("context", "candidates", "top_k", *_OPTIONS),
    "lookup": ("sparse", "weights", *_OPTIONS),
}
_PART_KEYS = ("sparse", "weights", "dense")
_SHOWN_CHARS = 40
# Values are looked at by so many at once; only of a piece with a wrong one, each by itself.
_PIECE = 1024
_DECODER = msgspec.json.Decoder()
# Beyond every range here. Stands for an integer of so many digits that Python does not convert them.
_MOST_DIGITS = 100
_HUGE = 10**5000


def decode_plainly(text: bytes | bytearray, method: Method, limits: RequestLimits) -> Mapping[str, Any]:
    """Decode a request with the library and check what does not depend on the model.

    Raises:
        MalformedRequestError: the text is not JSON, or no object.
        InvalidFieldError: a key that there is not, or an option that is not what it must be.
        LimitExceededError: an option above its limit.
    """
    request = _decoded(text)
    _check_keys("", request, _KEYS[method])
    for key in ("timeout_ms", "version", "top_k"):
        value = request.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidFieldError(key, f"{shown(value)} is not an integer")
        if not 1 <= value <= MAX_ID:
            most = f"max_timeout_ms = {limits.max_timeout_ms}" if key == "timeout_ms" else MAX_ID
            raise InvalidFieldError(key, f"{shown(value)} is not in 1..{most}")
    for field in _TEXTS:
        given = request.get(field, "")
        if not isinstance(given, str):
            raise InvalidFieldError(field, f"{shown(given)} is not a string")
        check_text(limits, field, given)
    return request


def refusal_of(
    schema: RequestSchema, method: Method, request: Mapping[str, Any] | bytes | bytearray
) -> BadRequestError:
    """The error that fits the first problem of a request that the reader did not take.

    Nothing that was made to find it is left when it is returned, nor does it refer to any.

    Args:
        schema: of the model.
        method: what is asked for.
        request: its text, or what `decode_plainly` made of it.
    """
    with many_lists():
        return _refusal(schema, method, request)


def _refusal(schema: RequestSchema, method: Method, request: Mapping[str, Any] | bytes | bytearray) -> BadRequestError:
    try:
        if not isinstance(request, Mapping):
            request = decode_plainly(request, method, schema.limits)
        (_check_rank if method == "rank" else _check_lookup)(schema, request)
    except BadRequestError as error:
        return error.with_traceback(None)
    problem = "a number is an integer beyond 64 bits, which is not taken even where a float belongs"
    return InvalidFieldError("", problem)


def _check_rank(schema: RequestSchema, request: Mapping[str, Any]) -> None:
    if "candidates" not in request:
        raise InvalidFieldError("candidates", "missing; a rank request needs its candidates")
    context = _object("context", request.get("context", {}))
    candidates = _object("candidates", request["candidates"])
    for part, value in (("context", context), ("candidates", candidates)):
        _check_keys(part, value, _PART_KEYS)
    _check_sparse(schema, "context", context, all_needed=True)
    _check_sparse(schema, "candidates", candidates, all_needed=True)
    _check_candidate_counts(schema, candidates)
    _check_context_dense(schema, context.get("dense", []))
    _check_candidate_dense(schema, candidates)


def _check_lookup(schema: RequestSchema, request: Mapping[str, Any]) -> None:
    if "sparse" not in request:
        raise InvalidFieldError("sparse", "missing; a lookup needs the ids of at least one feature")
    _check_sparse(schema, "", request, all_needed=False)


def shown(value: Any) -> str:
    """A value as it looked in JSON, cut short."""
    if isinstance(value, list):
        return "a list"
    if isinstance(value, Mapping):
        return "an object"
    try:
        text = json.dumps(value)
    except ValueError:  # an integer with more digits than Python prints
        return "a huge integer"
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."


def _decoded(text: bytes | bytearray) -> Mapping[str, Any]:
    for what, character, most in (("objects", _BRACE, MAX_OBJECTS), ("keys", _COLON, MAX_KEYS)):
        if count := count_above(text, character, most):
            raise InvalidFieldError("", f"{count} {what}; a request has fewer than {most}")
    try:
        with many_lists():
            request = _decoded_slowly(text) if len(text) <= MAX_SLOW_BYTES else _DECODER.decode(text)
    except UnicodeDecodeError as error:
        raise MalformedRequestError("", f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise MalformedRequestError("", f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except msgspec.ValidationError as error:
        raise InvalidFieldError("", str(error)) from None
    except msgspec.DecodeError as error:
        raise MalformedRequestError("", f"the body is not JSON: {error}") from None
    except (ValueError, RecursionError) as error:
        raise MalformedRequestError("", f"the body is not JSON that can be read: {error}") from None
    if not isinstance(request, dict):
        raise MalformedRequestError("", f"the body is {shown(request)}, not an object")
    return request


def _decoded_slowly(text: bytes | bytearray) -> Any:
    decoded = text.decode("utf-8")
    try:
        return json.loads(decoded, object_pairs_hook=_object_of)
    except json.JSONDecodeError:
        raise
    except ValueError:  # an integer with more digits than Python converts; its field is to be named
        return json.loads(decoded, object_pairs_hook=_object_of, parse_int=_bounded_int)


def key_twice(keys: Sequence[str]) -> InvalidFieldError:
    """The error for keys of which one is there twice."""
    seen: set[str] = set()
    twice = next(key for key in keys if key in seen or seen.add(key))  # type: ignore[func-returns-value]
    return InvalidFieldError(twice[:200], "the key is there twice")


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise key_twice([key for key, _ in pairs])
    return made


def _bounded_int(digits: str) -> int:
    if len(digits) <= _MOST_DIGITS:
        return int(digits)
    return -_HUGE if digits.startswith("-") else _HUGE


def _object(path: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidFieldError(path, f"{shown(value)} is not an object")
    return value


def _list(path: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidFieldError(path, f"{shown(value)} is not a list")
    return value


def _check_keys(path: str, value: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    for key in value:
        if key not in allowed:
            where = f"{path}.{key}" if path else str(key)
            raise InvalidFieldError(where[:200], f"unknown key; allowed are {list(allowed)}")


def _first_type(values: Sequence[Any], wanted: type) -> int | None:
    """The first position of a value of another type than `wanted`; None without one."""
    for start in range(0, len(values), _PIECE):
        piece = values[start : start + _PIECE]
        if set(map(type, piece)) != {wanted}:
            return start + next(number for number, one in enumerate(piece) if type(one) is not wanted)
    return None


def _first_outside(values: Sequence[int]) -> int | None:
    """The first position of an integer that is no id; None without one."""
    for start in range(0, len(values), _PIECE):
        piece = values[start : start + _PIECE]
        if min(piece) < 0 or max(piece) > MAX_ID:
            return start + next(number for number, one in enumerate(piece) if not 0 <= one <= MAX_ID)
    return None


def _check_sparse(schema: RequestSchema, part: Part, value: Mapping[str, Any], *, all_needed: bool) -> None:
    path = part_path(part, "sparse")
    sparse = _object(path, value.get("sparse", {}))
    schema.check_names(part, list(map(str, sparse)), all_needed=all_needed)
    for name, ids in sparse.items():
        _check_feature(schema, part, name, ids)
    weights_path = part_path(part, "weights")
    weights = value.get("weights")
    if weights is None:
        return
    for name, given in _object(weights_path, weights).items():
        if name not in schema.names_of(part):
            raise schema.unknown_feature(part, str(name))
        where = f"{weights_path}.{name}"
        if name not in schema.weighted_names:
            raise InvalidFieldError(where, f"feature {name!r} takes no weights")
        if name not in sparse:
            raise MissingFeatureError(f"{path}.{name}", f"{where} is given, but not its ids")
        if given is not None:
            _check_weights(where, sparse[name], given)


def _check_feature(schema: RequestSchema, part: Part, name: str, ids: Any) -> None:
    path = part_path(part, f"sparse.{name}")
    column = _list(path, ids)
    check_bags_of_feature(schema, part, name, len(column))
    is_string = name in schema.features.string_features
    nested = part != "context" and bool(column) and isinstance(column[0], list)
    flat = column
    if nested:
        if (other := _first_type(column, list)) is not None:
            problem = f"{shown(column[other])} is not a list of ids, as the first one is"
            raise InvalidFieldError(f"{path}[{other}]", problem)
        flat = list(chain.from_iterable(column))
    position = _first_type(flat, str if is_string else int)
    if position is None and flat:
        position = _first_surrogate(flat) if is_string else _first_outside(flat)
    if position is not None:
        raise _wrong_id(_place(path, column, position, nested=nested), part, name, flat[position], is_string=is_string)


def _wrong_id(path: str, part: Part, name: str, value: Any, *, is_string: bool) -> InvalidFieldError | InvalidIdError:
    if isinstance(value, list):
        return InvalidFieldError(path, f"a list is not an id{'' if part == 'context' else ', as the first one is'}")
    if is_string:
        if not isinstance(value, str):
            return InvalidIdError(path, f"{shown(value)} is not a string; ids of {name!r} are strings")
        return InvalidIdError(path, f"{shown(value)} is not valid Unicode")
    if isinstance(value, bool) or not isinstance(value, int):
        return InvalidIdError(path, f"{shown(value)} is not an integer; ids of {name!r} are integers in 0..{MAX_ID}")
    return InvalidIdError(path, f"{shown(value)} is not in 0..{MAX_ID}")


def _first_surrogate(texts: Sequence[str]) -> int | None:
    if not has_lone_surrogate("".join(texts)):
        return None
    return next(number for number, text in enumerate(texts) if has_lone_surrogate(text))


def _place(path: str, column: Sequence[Any], position: int, *, nested: bool) -> str:
    """The path of one value of a column, from its position among all values."""
    if not nested:
        return f"{path}[{position}]"
    ends = np.cumsum(np.fromiter(map(len, column), np.int64, count=len(column)))
    bag = int(np.searchsorted(ends, position, side="right"))
    return f"{path}[{bag}][{position - int(ends[bag]) + len(column[bag])}]"


def _check_weights(path: str, ids: list[Any], weights: Any) -> None:
    column = _list(path, weights)
    if len(column) != len(ids):
        raise CountMismatchError(path, f"{len(column)} entries, but its ids have {len(ids)}")
    nested = bool(ids) and isinstance(ids[0], list)
    flat = column
    if nested:
        if (other := _first_type(column, list)) is not None:
            raise InvalidFieldError(f"{path}[{other}]", f"{shown(column[other])} is not a list")
        differ = list(map(operator.ne, map(len, column), map(len, ids)))
        if True in differ:
            number = differ.index(True)
            raise CountMismatchError(f"{path}[{number}]", f"{len(column[number])} weights for {len(ids[number])} ids")
        flat = list(chain.from_iterable(column))
    position = _first_not_finite(flat)
    if position is not None:
        where = _place(path, column, position, nested=nested)
        raise InvalidFieldError(where, f"{shown(flat[position])} is not a finite float32")


def _first_not_finite(values: Sequence[Any]) -> int | None:
    """The first position of what is no number that float32 can hold; None without one."""
    for start in range(0, len(values), _PIECE):
        piece = values[start : start + _PIECE]
        if not set(map(type, piece)) <= {int, float} or not _are_finite(piece):
            return start + next(number for number, one in enumerate(piece) if not is_finite_number(one))
    return None


def _are_finite(numbers: Sequence[float]) -> bool:
    # The largest may be found beside a NaN, the sum not.
    return max(map(abs, numbers)) <= MAX_FLOAT32 and not math.isnan(sum(numbers))


def _check_candidate_counts(schema: RequestSchema, candidates: Mapping[str, Any]) -> None:
    sparse = candidates.get("sparse", {})
    counts = {name: len(sparse[name]) for name in schema.candidate_names}
    for name, count in counts.items():
        first, expected = next(iter(counts.items()))
        if count != expected:
            raise CountMismatchError(f"candidates.sparse.{name}", f"{count} candidates, but {first!r} has {expected}")
    dense = _list("candidates.dense", candidates.get("dense", []))
    check_num_candidates(schema.limits, next(iter(counts.values())) if counts else len(dense))


def _check_context_dense(schema: RequestSchema, value: Any) -> None:
    dense = _list("context.dense", value)
    if len(dense) != schema.num_context_dense:
        raise CountMismatchError("context.dense", f"{len(dense)} values, the model takes {schema.num_context_dense}")
    if (position := _first_not_finite(dense)) is not None:
        raise InvalidFieldError(f"context.dense[{position}]", f"{shown(dense[position])} is not a finite float32")


def _check_candidate_dense(schema: RequestSchema, candidates: Mapping[str, Any]) -> None:
    rows = _list("candidates.dense", candidates.get("dense", []))
    sparse = candidates.get("sparse", {})
    expected = len(sparse[schema.candidate_names[0]]) if schema.candidate_names else len(rows)
    width = schema.num_candidate_dense
    if width == 0 and not rows:
        return
    if len(rows) != expected:
        raise CountMismatchError("candidates.dense", f"{len(rows)} rows for {expected} candidates")
    if (other := _first_type(rows, list)) is not None:
        raise InvalidFieldError(f"candidates.dense[{other}]", f"{shown(rows[other])} is not a list")
    wrong = list(map(operator.ne, map(len, rows), repeat(width)))
    if True in wrong:
        number = wrong.index(True)
        problem = f"{len(rows[number])} values, the model takes {width}"
        raise CountMismatchError(f"candidates.dense[{number}]", problem)
    flat = list(chain.from_iterable(rows))
    if (position := _first_not_finite(flat)) is not None:
        where = f"candidates.dense[{position // width}][{position % width}]"
        raise InvalidFieldError(where, f"{shown(flat[position])} is not a finite float32")
