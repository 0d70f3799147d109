"""What is wrong with a document that does not fit its schema, for the one who wrote the document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

_LENGTH_ERRORS = frozenset({"too_short", "too_long"})


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
    """The mistakes in a document; an unknown key comes with those that are allowed there.

    Args:
        error: what pydantic found.
        schemas: the model that was validated, or those of a union told apart by `kind`.
        elsewhere: fields of the schemas that are no keys of the document.
    """
    found = error.errors(include_url=False, include_context=False)
    roots, hidden = tuple(schemas), frozenset(elsewhere)
    for one in found:
        if not _follows_from_another(one, found):
            yield SchemaError(one["loc"], _problem(one, roots, hidden), one["input"])


def _follows_from_another(one: ErrorDetails, found: list[ErrorDetails]) -> bool:
    """Whether a list is only said to be too short because validation stopped at one of its bad items."""
    place = one["loc"]
    return one["type"] in _LENGTH_ERRORS and any(
        len(other["loc"]) > len(place) and other["loc"][: len(place)] == place for other in found
    )


def _problem(one: ErrorDetails, schemas: tuple[type[BaseModel], ...], hidden: frozenset[str]) -> str:
    if one["type"] != "extra_forbidden":
        return one["msg"]
    *place, key = one["loc"]
    allowed = [name for name in _allowed_keys(place, schemas) if name not in hidden]
    return f"unknown key {key!r:.80}; allowed are {allowed}"


def _allowed_keys(place: Iterable[int | str], schemas: tuple[type[BaseModel], ...]) -> list[str]:
    """The keys of the object at `place`, in the order of its schema."""
    for part in place:
        if isinstance(part, int):
            continue
        fields = [schema.model_fields[part].annotation for schema in schemas if part in schema.model_fields]
        # A part that is no field is the tag by which pydantic names the member of a union.
        schemas = (
            tuple(inner for annotation in fields for inner in _models_in(annotation))
            if fields
            else tuple(schema for schema in schemas if _is_tagged(schema, part))
        )
    return list(dict.fromkeys(name for schema in schemas for name in schema.model_fields))


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)


def _is_tagged(schema: type[BaseModel], tag: str) -> bool:
    kind = schema.model_fields.get("kind")
    return kind is not None and get_origin(kind.annotation) is Literal and tag in get_args(kind.annotation)
