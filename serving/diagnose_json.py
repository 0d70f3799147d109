"""Why a JSON request was refused: a slow pass over the plainly decoded body that names the first place that is wrong.

Runs only after the fast path has refused a body. It raises, or returns if it finds nothing that it knows of.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from serving.errors import (
    CountMismatchError,
    InvalidFieldError,
    InvalidIdError,
    MalformedRequestError,
    MissingFeatureError,
)
from serving.limits import MAX_ID
from serving.parse_checks import TextField, check_num_candidates, check_text, has_lone_surrogate, is_finite_number
from serving.parse_schema import Part, RequestSchema, part_path

_TEXTS: tuple[TextField, ...] = ("request_id", "routing_key")
_OPTIONS = ("timeout_ms", "version", *_TEXTS)
_RANK_KEYS = ("context", "candidates", "top_k", *_OPTIONS)
_LOOKUP_KEYS = ("sparse", "weights", *_OPTIONS)
_PART_KEYS = ("sparse", "weights", "dense")
_SHOWN_CHARS = 40
# Beyond every range here. Stands for an integer of so many digits that Python does not convert them.
_MOST_DIGITS = 100
_HUGE = 10**5000


def diagnose_rank(schema: RequestSchema, body: bytes | bytearray | Mapping[str, Any]) -> None:
    """Raises the BadRequestError that fits the first problem of a rank body; returns if there is none."""
    request = _plain(body)
    _check_keys("", request, _RANK_KEYS)
    _check_options(schema, request)
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


def diagnose_lookup(schema: RequestSchema, body: bytes | bytearray | Mapping[str, Any]) -> None:
    """Raises the BadRequestError that fits the first problem of a lookup body; returns if there is none."""
    request = _plain(body)
    _check_keys("", request, _LOOKUP_KEYS)
    _check_options(schema, request)
    if "sparse" not in request:
        raise InvalidFieldError("sparse", "missing; a lookup needs the ids of at least one feature")
    _check_sparse(schema, "", request, all_needed=False)


def shown(value: Any) -> str:
    """A value as it looked in JSON, cut short."""
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, Mapping):
        return "an object"
    if value is None or isinstance(value, bool | int | float | str):
        try:
            text = json.dumps(value)
        except ValueError:  # an integer with more digits than Python prints
            return "a huge integer"
        return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."
    return f"a Python {type(value).__name__}"


def _plain(body: bytes | bytearray | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(body, Mapping):
        return body
    try:
        text = body.decode("utf-8")
        try:
            request = json.loads(text)
        except json.JSONDecodeError:
            raise
        except ValueError:  # an integer with more digits than Python converts; its field is to be named
            request = json.loads(text, parse_int=_bounded_int)
    except UnicodeDecodeError as error:
        raise MalformedRequestError("", f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise MalformedRequestError("", f"the body is not JSON: {error.msg} at character {error.pos}") from error
    except (ValueError, RecursionError) as error:
        raise MalformedRequestError("", f"the body is not JSON that can be read: {error}") from error
    if not isinstance(request, dict):
        raise MalformedRequestError("", f"the body is {shown(request)}, not an object")
    return request


def _bounded_int(digits: str) -> int:
    if len(digits) <= _MOST_DIGITS:
        return int(digits)
    return -_HUGE if digits.startswith("-") else _HUGE


def _object(path: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidFieldError(path, f"{shown(value)} is not an object")
    return value


def _list(path: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise InvalidFieldError(path, f"{shown(value)} is not a list")
    return value


def _check_keys(path: str, value: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    for key in value:
        if key not in allowed:
            where = f"{path}.{key}" if path else str(key)
            raise InvalidFieldError(where[:200], f"unknown key; allowed are {list(allowed)}")


def _check_options(schema: RequestSchema, request: Mapping[str, Any]) -> None:
    for key in ("timeout_ms", "version", "top_k"):
        value = request.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidFieldError(key, f"{shown(value)} is not an integer")
        if not 1 <= value <= MAX_ID:
            most = f"max_timeout_ms = {schema.limits.max_timeout_ms}" if key == "timeout_ms" else MAX_ID
            raise InvalidFieldError(key, f"{shown(value)} is not in 1..{most}")
    for field in _TEXTS:
        text = request.get(field, "")
        if not isinstance(text, str):
            raise InvalidFieldError(field, f"{shown(text)} is not a string")
        check_text(schema.limits, field, text)


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
    is_string = name in schema.features.string_features
    nested = part != "context" and bool(column) and isinstance(column[0], list | tuple)
    if _is_plain(column, nested=nested, is_string=is_string):
        return
    for number, entry in enumerate(column):
        where = f"{path}[{number}]"
        if isinstance(entry, list | tuple) != nested:
            wanted = "a list of ids, as the first one is" if nested else "an id, as the first one is"
            raise InvalidFieldError(where, f"{shown(entry)} is not {'an id' if part == 'context' else wanted}")
        if nested:
            for position, one in enumerate(entry):
                _check_id(f"{where}[{position}]", name, one, is_string=is_string)
        else:
            _check_id(where, name, entry, is_string=is_string)


def _is_plain(column: Sequence[Any], *, nested: bool, is_string: bool) -> bool:
    """Whether all is well with a column of ids, without a step of Python for each; False if that can't be told so."""
    if nested and set(map(type, column)) != {list}:
        return False
    ids: list[Any] | Sequence[Any] = list(chain.from_iterable(column)) if nested else column
    if not ids:
        return True
    if set(map(type, ids)) != {str if is_string else int}:
        return False
    return not has_lone_surrogate("".join(ids)) if is_string else min(ids) >= 0 and max(ids) <= MAX_ID


def _check_id(path: str, name: str, value: Any, *, is_string: bool) -> None:
    if is_string:
        if not isinstance(value, str):
            raise InvalidIdError(path, f"{shown(value)} is not a string; ids of {name!r} are strings")
        if has_lone_surrogate(value):
            raise InvalidIdError(path, f"{shown(value)} is not valid Unicode")
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidIdError(path, f"{shown(value)} is not an integer; ids of {name!r} are integers in 0..{MAX_ID}")
    if not 0 <= value <= MAX_ID:
        raise InvalidIdError(path, f"{shown(value)} is not in 0..{MAX_ID}")


def _check_weights(path: str, ids: Sequence[Any], weights: Any) -> None:
    column = _list(path, weights)
    if len(column) != len(ids):
        raise CountMismatchError(path, f"{len(column)} entries, but its ids have {len(ids)}")
    for number, (entry, bag) in enumerate(zip(column, ids, strict=True)):
        where = f"{path}[{number}]"
        if not isinstance(bag, list | tuple):
            _check_weight(where, entry)
            continue
        if len(_list(where, entry)) != len(bag):
            raise CountMismatchError(where, f"{len(entry)} weights for {len(bag)} ids")
        for position, weight in enumerate(entry):
            _check_weight(f"{where}[{position}]", weight)


def _check_weight(path: str, value: Any) -> None:
    if not is_finite_number(value):
        raise InvalidFieldError(path, f"{shown(value)} is not a finite float32")


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
    _check_floats("context.dense", dense)


def _check_candidate_dense(schema: RequestSchema, candidates: Mapping[str, Any]) -> None:
    rows = _list("candidates.dense", candidates.get("dense", []))
    sparse = candidates.get("sparse", {})
    expected = len(sparse[schema.candidate_names[0]]) if schema.candidate_names else len(rows)
    width = schema.num_candidate_dense
    if width == 0 and not rows:
        return
    if len(rows) != expected:
        raise CountMismatchError("candidates.dense", f"{len(rows)} rows for {expected} candidates")
    for number, row in enumerate(rows):
        path = f"candidates.dense[{number}]"
        if len(_list(path, row)) != width:
            raise CountMismatchError(path, f"{len(row)} values, the model takes {width}")
        _check_floats(path, row)


def _check_floats(path: str, values: Sequence[Any]) -> None:
    for number, value in enumerate(values):
        if not is_finite_number(value):
            raise InvalidFieldError(f"{path}[{number}]", f"{shown(value)} is not a finite float32")
