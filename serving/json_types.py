"""The typed form of a JSON request to one model version, for msgspec.

Unknown and missing keys, wrong types and ids out of range are refused while the text is decoded, at no cost for each
id beyond decoding it.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from serving.limits import MAX_ID
from serving.parse_schema import Part, RequestSchema

_Integer = Annotated[int, Meta(ge=0, le=MAX_ID)]
_Version = Annotated[int, Meta(ge=1, le=MAX_ID)]
_CONTEXT_IDS: dict[bool, Any] = {False: list[_Integer], True: list[str]}
_CANDIDATE_IDS: dict[bool, Any] = {False: list[_Integer | list[_Integer]], True: list[str | list[str]]}
_CONTEXT_WEIGHTS: Any = list[float]
_CANDIDATE_WEIGHTS: Any = list[float | list[float]]


class VersionPeek(msgspec.Struct):
    """Only `version`: which version's types the body must be decoded with."""

    version: _Version | UnsetType = UNSET


class KeyPeek(msgspec.Struct):
    """Only what a canary is chosen by."""

    routing_key: str = ""
    request_id: str = ""


@dataclass(frozen=True)
class JsonTypes:
    """Struct types of the two request bodies.

    Attributes:
        rank: fields context, candidates, timeout_ms, top_k, version, request_id, routing_key.
        lookup: fields sparse, weights, timeout_ms, version, request_id, routing_key.
        fields: for each feature in flat order, the struct field that holds it (feature names are not identifiers).
    """

    rank: type[msgspec.Struct]
    lookup: type[msgspec.Struct]
    fields: tuple[str, ...]

    @classmethod
    def of(cls, schema: RequestSchema) -> JsonTypes:
        """Makes the types for a schema."""
        options: list[tuple[str, Any, Any]] = [
            ("timeout_ms", int | UnsetType, UNSET),
            ("version", _Version | UnsetType, UNSET),
            ("request_id", str, ""),
            ("routing_key", str, ""),
        ]
        # msgspec has no required field with a default type, so a part without features is optional and empty.
        context = _part_type(schema, "context", _CONTEXT_WEIGHTS, list[float])
        candidates = _part_type(schema, "candidates", _CANDIDATE_WEIGHTS, list[list[float]])
        needs_context = bool(schema.context_names or schema.num_context_dense)
        rank = _struct(
            "RankBody",
            [
                ("context", context) if needs_context else ("context", context, msgspec.field(default_factory=context)),
                ("candidates", candidates),
                ("top_k", int | UnsetType, UNSET),
                *options,
            ],
        )
        lookup = _struct(
            "LookupBody",
            [
                ("sparse", _sparse_type(schema, "")),
                ("weights", _weights_type(schema, "", _CANDIDATE_WEIGHTS), None),
                *options,
            ],
        )
        return cls(rank, lookup, tuple(_field(number) for number in range(len(schema.names))))

    def columns(self, schema: RequestSchema, part: Part) -> Any:
        """A function from a part's decoded `sparse` or `weights` to the tuple of its features, in flat order."""
        fields = [self.fields[schema.features.index[name]] for name in schema.names_of(part)]
        if not fields:
            return lambda struct: ()
        if len(fields) == 1:
            one = attrgetter(fields[0])
            return lambda struct: (one(struct),)
        return attrgetter(*fields)


def _field(number: int) -> str:
    return f"f{number}"


def _struct(name: str, fields: list[Any]) -> type[msgspec.Struct]:
    return msgspec.defstruct(name, fields, forbid_unknown_fields=True, kw_only=True, gc=False)


def _part_type(schema: RequestSchema, part: Part, weights: Any, dense: Any) -> type[msgspec.Struct]:
    sparse = _sparse_type(schema, part)
    count = schema.num_context_dense if part == "context" else schema.num_candidate_dense
    return _struct(
        f"{part}Part",
        [
            ("sparse", sparse) if schema.names_of(part) else ("sparse", sparse, msgspec.field(default_factory=sparse)),
            ("weights", _weights_type(schema, part, weights), None),
            ("dense", dense) if count else ("dense", dense, msgspec.field(default_factory=list)),
        ],
    )


def _sparse_type(schema: RequestSchema, part: Part) -> type[msgspec.Struct]:
    fields: list[Any] = []
    for name in schema.names_of(part):
        number = schema.features.index[name]
        ids = (_CONTEXT_IDS if part == "context" else _CANDIDATE_IDS)[bool(schema.is_string[number])]
        if part:
            fields.append((_field(number), ids, msgspec.field(name=name)))
        else:
            fields.append((_field(number), ids | UnsetType, msgspec.field(name=name, default=UNSET)))
    return _struct("Sparse", fields)


def _weights_type(schema: RequestSchema, part: Part, weights: Any) -> Any:
    fields = []
    for name in schema.names_of(part):
        if name in schema.weighted_names:
            field = msgspec.field(name=name, default=None)
            fields.append((_field(schema.features.index[name]), weights | None, field))
    return _struct("Weights", fields) | None
