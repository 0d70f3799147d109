"""What settings are made of: a frozen model, fields with help and flags, and texts that become values.

Imports nothing heavy, so that `--help` is quick: what checks a value with the code of another package imports it when
there is a value.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, TypeAlias, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationInfo
from pydantic.fields import FieldInfo


def setting(default: Any, flag: str = "", *, file_only: bool = False, **more: Any) -> Any:
    """Return a field with bounds as `pydantic.Field` takes them, and its flag; its docstring is the help.

    `flag` is `--flag METAVAR`, or METAVAR alone where the other follows from the field's name. With `file_only` there
    is none: the file and the variable set it.
    """
    return Field(default, json_schema_extra={"flag": flag, "file_only": file_only}, **more)


def assignments(value: Any) -> Any:
    """Return the dict of `NAME=VALUE` texts, as flags and variables have them; anything else as it is."""
    if not isinstance(value, list | tuple):
        return value
    pairs = [text.partition("=") for text in value if isinstance(text, str)]
    for (name, _, item), text in zip(pairs, value, strict=True):
        if not name or not item:
            raise ValueError(f"{text!r} is not NAME=VALUE")
    return {name: item for name, _, item in pairs}


def _shard_number(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    index, _, count = value.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise ValueError(f"{value!r} is not I/N with 0 <= I < N, such as 0/2")
    return int(index), int(count)


def store_or_path(value: Any) -> Any:
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
        time_s = float(number) * _UNITS_S[value.strip()[len(number) :] or "s"]
    except (ValueError, KeyError):
        time_s = math.nan
    if not 0 <= time_s < math.inf:
        raise ValueError(f"{value!r} is not a time such as 60s, 2m, 500ms or 1h")
    return time_s


def plain_type(field: FieldInfo) -> Any:
    """Return the type of a field without None and annotations, such as `tuple` for several; str for a union."""
    kind = field.annotation
    if get_origin(kind) in (Union, UnionType):
        kinds = [member for member in get_args(kind) if member is not NoneType]
        kind = kinds[0] if len(kinds) == 1 else str
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    origin = get_origin(kind)
    if origin is tuple and get_args(kind)[-1] is not Ellipsis:
        return str
    return kind if origin in (None, Literal) else str if origin in (Union, UnionType) else origin


def _checked_by(module: str, name: str) -> AfterValidator:
    """Return a validator of values by name, by a model of a module that is imported if there are any."""

    def check(values: dict[str, Any]) -> dict[str, Any]:
        if not values:
            return values
        from loader.snapshot.tables import refused_as

        schema: type[BaseModel] = getattr(importlib.import_module(module), name)
        with refused_as(ValueError, "", schema):
            return schema.model_validate(values).model_dump(exclude_unset=True)

    return AfterValidator(check)


ByName: TypeAlias = Annotated[dict[str, Any], BeforeValidator(assignments)]
Limits: TypeAlias = Annotated[ByName, _checked_by("serving.limits", "RequestLimits")]
Policy: TypeAlias = Annotated[ByName, _checked_by("router.outliers", "ReplicaPolicy")]
Staleness: TypeAlias = Annotated[dict[str, float], BeforeValidator(assignments)]
WhenStale: TypeAlias = Literal["answer", "other-replica", "refuse"]
WhenStales: TypeAlias = Annotated[dict[str, WhenStale], BeforeValidator(assignments)]
Shard: TypeAlias = Annotated[
    tuple[int, int],
    BeforeValidator(_shard_number),
    PlainSerializer(lambda shard: f"{shard[0]}/{shard[1]}", when_used="json"),
]
Store: TypeAlias = Annotated[Path | str, BeforeValidator(store_or_path)]


class Settings(BaseModel):
    """Immutable, and an unknown key is an error: a misspelt setting must not be ignored.

    A setting is a field that is not excluded from dumps; its docstring is its help.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True, use_attribute_docstrings=True
    )

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of the settings, which are the keys of a file."""
        return [name for name, field in cls.model_fields.items() if not field.exclude]

    @classmethod
    def help(cls, name: str) -> str:
        """Return the help of a setting: its docstring in one line."""
        return " ".join((cls.model_fields[name].description or "").split())

    @classmethod
    def is_file_only(cls, name: str) -> bool:
        """Return whether a setting has no flag: the file and its variable set it."""
        return bool(cls._extra(name).get("file_only"))

    @classmethod
    def flag(cls, name: str) -> str:
        """Return the flag of a setting, `--hot-rows-gb`; of one that only files set, what other commands call it."""
        return cls._flag(name)[0] or f"--{name.replace('_', '-')}"

    @classmethod
    def metavar(cls, name: str) -> str:
        """Return what stands for the value in the help; empty if that follows from the type."""
        return cls._flag(name)[2]

    @classmethod
    def _flag(cls, name: str) -> tuple[str, str, str]:
        return str(cls._extra(name).get("flag", "")).rpartition(" ")

    @classmethod
    def _extra(cls, name: str) -> Mapping[str, Any]:
        extra = cls.model_fields[name].json_schema_extra
        return extra if isinstance(extra, dict) else {}

    @classmethod
    def labels(cls, names: Iterable[str]) -> str:
        """Return the flags of settings, and the keys of those that have none, by name with commas between."""
        return ", ".join(name if cls.is_file_only(name) else cls.flag(name) for name in sorted(names))

    def given(self, info: ValidationInfo | None = None) -> set[str]:
        """Return the settings that a flag or the file has set, and not to their defaults."""
        names = info.context["given"] if info is not None and info.context else self.model_fields_set
        fields = type(self).model_fields
        return {name for name in names if getattr(self, name) != fields[name].get_default(call_default_factory=True)}

    def to_toml(self, *, masked: bool = False, sparse: bool = False) -> str:
        """Return the settings as the text of a file, paths made absolute.

        `masked`: without users and passwords; `sparse`: without defaults, which other releases may have no names for.
        """
        from loader.registry.registry import without_password

        dumped = self.model_dump(mode="json", include={*self.names()}, exclude_none=True, exclude_defaults=sparse)
        # A link is kept as it is: setting it anew is how secrets change.
        paths = {name: str(path.absolute()) for name in dumped if isinstance(path := getattr(self, name), Path)}
        mask = without_password if masked else str
        return "".join(f"{name} = {_toml(value, mask)}\n" for name, value in (dumped | paths).items())

    def write(self, path: Path) -> None:
        """Write the file of `--config` for another process, readable by this user alone."""
        with open(path, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(self.to_toml(sparse=True))


def _toml(value: Any, mask: Callable[[str], str]) -> str:
    """Return a value as TOML writes it, which is as JSON does but for the `=` of a table; texts as `mask` has them."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(item, mask)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item, mask) for item in value) + "]"
    return json.dumps(mask(value) if isinstance(value, str) else value, ensure_ascii=False)
