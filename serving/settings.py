"""What settings are made of: a frozen model, fields with help and flags, and texts that become values.

Imports nothing heavy, so that `--help` is quick: what checks a value with the code of another package imports it when
there is a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationInfo


def setting(default: Any, text: str, flag: str = "", *, file_only: bool = False, **more: Any) -> Any:
    """Return a field: its help, bounds as `pydantic.Field` takes them, and its flag.

    `flag` is `--flag METAVAR`, or one of both where the other follows from the field's name and type. With `file_only`
    there is none: the file and the variable set it.
    """
    return Field(default, description=text, json_schema_extra={"flag": flag, "file_only": file_only}, **more)


def assignments(value: Any, expected: str = "NAME=VALUE") -> Any:
    """Return the dict of `NAME=VALUE` texts, as flags and variables have them; anything else as it is."""
    if not isinstance(value, list | tuple):
        return value
    pairs = [text.partition("=") for text in value if isinstance(text, str)]
    for (name, _, item), text in zip(pairs, value, strict=True):
        if not name or not item:
            raise ValueError(f"{text!r} is not {expected}")
    return {name: item for name, _, item in pairs}


def _role_pairs(value: Any) -> Any:
    texts = value if isinstance(value, list | tuple) else ()
    pairs = [text.partition("=")[::2] if isinstance(text, str) else text for text in texts]
    if wrong := [text for text, pair in zip(texts, pairs, strict=True) if not all(pair)]:
        raise ValueError(f"{wrong[0]!r} is not ROLE=URI")
    return pairs or value


def _shard_number(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    index, _, count = value.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise ValueError(f"{value!r} is not I/N with 0 <= I < N, such as 0/2")
    return int(index), int(count)


def _store_text(value: Any) -> Any:
    """Return a URL as it is, and the path of anything else, which is no file."""
    if not isinstance(value, str) or "://" in value:
        return value
    if (path := Path(value)).is_file():
        raise ValueError(f"{value!r} is a file; expected a folder, or a URL")
    return path


_UNITS_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def seconds(value: Any) -> Any:
    """Return the seconds of `60s`, `2m`, `500ms` or `1h`, of a text that is a number, or a number itself."""
    if not isinstance(value, str):
        return value
    number = value.strip().rstrip("hms")
    try:
        return float(number) * _UNITS_S[value.strip()[len(number) :] or "s"]
    except (ValueError, KeyError):
        raise ValueError(f"{value!r} is not a time such as 60s, 2m, 500ms or 1h") from None


def _checked_by(load: Callable[[], type[BaseModel]]) -> AfterValidator:
    """Return a validator of values by name that a model of another package checks, which is imported if there are."""

    def check(values: dict[str, Any]) -> dict[str, Any]:
        if not values:
            return values
        from pydantic import ValidationError

        from loader.snapshot.tables import schema_errors

        schema = load()
        try:
            return schema.model_validate(values).model_dump(exclude_unset=True)
        except ValidationError as error:
            raise ValueError("; ".join(map(str, schema_errors(error, [schema])))) from error

    return AfterValidator(check)


def _limits_model() -> type[BaseModel]:
    from serving.limits import RequestLimits

    return RequestLimits


def _policy_model() -> type[BaseModel]:
    from router.outliers import ReplicaPolicy

    return ReplicaPolicy


ByName: TypeAlias = Annotated[dict[str, Any], BeforeValidator(assignments)]
Limits: TypeAlias = Annotated[ByName, _checked_by(_limits_model)]
Policy: TypeAlias = Annotated[ByName, _checked_by(_policy_model)]
Staleness: TypeAlias = Annotated[dict[str, float], BeforeValidator(lambda value: assignments(value, "MODEL=SECONDS"))]
RoleUris: TypeAlias = Annotated[
    tuple[tuple[str, str], ...],
    BeforeValidator(_role_pairs),
    PlainSerializer(lambda pairs: ["=".join(pair) for pair in pairs], when_used="json"),
]
Shard: TypeAlias = Annotated[
    tuple[int, int],
    BeforeValidator(_shard_number),
    PlainSerializer(lambda shard: f"{shard[0]}/{shard[1]}", when_used="json"),
]
Store: TypeAlias = Annotated[Path | str, BeforeValidator(_store_text)]
Seconds: TypeAlias = Annotated[float, BeforeValidator(seconds)]


class Settings(BaseModel):
    """Immutable, and an unknown key is an error: a misspelt setting must not be ignored.

    `overruled` has fields that give way to others where those come by a nearer road, such as a flag against a variable.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)
    overruled: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    @classmethod
    def flag(cls, name: str) -> str:
        """Return the flag of a field, `--hot-rows-gb`; the field's name if only the file and its variable set it."""
        extra = cls.model_fields[name].json_schema_extra
        assert isinstance(extra, dict)
        if extra["file_only"]:
            return name
        text = str(extra["flag"]).partition(" ")[0]
        return text if text.startswith("--") else f"--{name.replace('_', '-')}"

    @classmethod
    def flags(cls, names: Iterable[str]) -> str:
        """Return the flags of fields with commas between, by name."""
        return ", ".join(map(cls.flag, sorted(names)))

    def given(self, info: ValidationInfo | None = None) -> set[str]:
        """Return the fields that a flag or the file has set, and not to their defaults."""
        names = info.context["given"] if info is not None and info.context else self.model_fields_set
        fields = type(self).model_fields
        return {name for name in names if getattr(self, name) != fields[name].get_default(call_default_factory=True)}
