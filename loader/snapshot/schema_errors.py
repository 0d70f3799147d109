"""What is told of a document that does not fit its schema: each mistake with its place, and what is allowed there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ValidationError

from loader.errors import cut

_QUOTED_ERRORS = 5


class SchemaError(NamedTuple):
    """One mistake: where, what is wrong, and the value that was found."""

    place: tuple[int | str, ...]
    problem: str
    value: object

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.place)) or 'document'}: {self.problem}"


def schema_errors(
    error: ValidationError, schemas: Iterable[type[BaseModel]], elsewhere: Iterable[str] = ()
) -> Iterator[SchemaError]:
    """Return the mistakes in a document; an unknown key comes with those that are allowed there.

    `schemas` are the model that was validated, or those of a union told apart by `kind`; `elsewhere` are fields of them
    that are no keys of the document.
    """
    found = error.errors(include_url=False, include_context=False)
    roots, hidden = tuple(schemas), frozenset(elsewhere)
    for one in found:
        # A list is also said to be too short if validation stopped at one of its bad items.
        place = one["loc"]
        if one["type"] in ("too_short", "too_long") and any(
            len(other["loc"]) > len(place) and other["loc"][: len(place)] == place for other in found
        ):
            continue
        problem = one["msg"]
        if one["type"] == "extra_forbidden":
            *above, key = place
            allowed = [name for name in _allowed_keys(above, roots) if name not in hidden]
            problem = f"unknown key {key!r:.80}; allowed are {allowed}"
        yield SchemaError(place, problem, one["input"])


def _tags_of(schema: type[BaseModel]) -> tuple[Any, ...]:
    fields = (schema.model_fields.get(name) for name in ("kind", "source"))
    return tuple(tag for field in fields if field is not None for tag in get_args(field.annotation))


def _allowed_keys(place: Iterable[int | str], schemas: tuple[type[BaseModel], ...]) -> list[str]:
    for part in place:
        if isinstance(part, int):
            continue
        fields = [schema.model_fields[part].annotation for schema in schemas if part in schema.model_fields]
        if fields:
            schemas = tuple(inner for annotation in fields for inner in _models_in(annotation))
            continue
        # A part that is no field is the tag by which pydantic names the member of a union, or a key of a mapping.
        tags = {one: _tags_of(one) for one in schemas}
        schemas = tuple(one for one in schemas if part in tags[one]) or tuple(
            one for one in schemas if not tags[one] or all(tags.values())
        )
    return list(dict.fromkeys(name for schema in schemas for name in schema.model_fields))


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)


def quoted_errors(error: ValidationError) -> str:
    """Return the first errors of a document that does not fit its schema, each with its place, in bounded length."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    quoted = [
        f"{cut('.'.join(map(str, one['loc'])) or 'document')}: {cut(one['msg'], 300)}" for one in found[:_QUOTED_ERRORS]
    ]
    more = f"; and {len(found) - _QUOTED_ERRORS} more" if len(found) > _QUOTED_ERRORS else ""
    return "; ".join(quoted) + more
