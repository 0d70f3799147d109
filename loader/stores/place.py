"""Where a store is: a folder, or a URL with the cache that it is read through."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final, Self, TypeAlias
from urllib.parse import unquote, urlsplit

import xxhash
from pydantic import Field, ValidationError, model_validator

from loader.errors import StoreUrlError, cut
from loader.snapshot.schema_errors import schema_errors
from loader.snapshot.tables import Frozen

URL_SCHEMES: Final = ("s3", "gs", "az")
DEFAULT_CACHE_BYTES: Final = 100 * 10**9
DEFAULT_TIMEOUT_S: Final = 60.0
FETCHING: Final = "fetching from the store"
"""What a fetch tells its progress of, in bytes."""
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_SEGMENT: Final = re.compile(r"[A-Za-z0-9_.=+-]+")


def default_cache() -> Path:
    """Return the folder that stores at URLs are read through if no other is named."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "shardrank" / "stores"


class StoreUrl(Frozen):
    """A store at a URL.

    Attributes:
        url: `s3://BUCKET[/PREFIX]`, `gs://BUCKET[/PREFIX]` or `az://CONTAINER[/PREFIX]`.
        cache: the folder that versions are fetched into. Processes of one machine may share it.
        cache_bytes: what it may hold; the versions used longest ago go first.
        timeout_s: how long one request may take, its retries included.
    """

    url: str
    cache: Path = Field(default_factory=default_cache)
    cache_bytes: int = Field(default=DEFAULT_CACHE_BYTES, ge=1)
    timeout_s: float = Field(default=DEFAULT_TIMEOUT_S, gt=0, le=3600)

    @model_validator(mode="after")
    def _check(self) -> Self:
        parts = urlsplit(self.url)
        segments = parts.path.strip("/").split("/") if parts.path.strip("/") else []
        if parts.scheme not in URL_SCHEMES or not _BUCKET.fullmatch(parts.netloc) or parts.query or parts.fragment:
            raise ValueError(f"url: {cut(_without_secrets(self.url))!r} is not {_ALLOWED}")
        if any(not _SEGMENT.fullmatch(one) or one in (".", "..") for one in segments):
            raise ValueError(f"url: {cut(self.url)!r}: a prefix is of letters, digits and _ . = + - between slashes")
        return self

    def __str__(self) -> str:
        """Return the URL, which has no secret in it."""
        return self.url

    @property
    def exports(self) -> Path:
        """The folder in which new versions of this store are made; not counted as the cache."""
        return self.cache / "exports" / xxhash.xxh3_64_hexdigest(self.url.encode())

    @property
    def arguments(self) -> list[str]:
        """The flags that give a child process the same store."""
        told = ["--store", self.url, "--store-cache", str(self.cache.absolute())]
        return [*told, "--store-cache-gb", repr(self.cache_bytes / 1e9), "--store-timeout-s", repr(self.timeout_s)]


_ALLOWED: Final = (
    f"{', '.join(f'{one}://BUCKET[/PREFIX]' for one in URL_SCHEMES)}, file:///PATH, or a path; credentials are taken "
    "from the environment"
)
StorePlace: TypeAlias = Path | StoreUrl


def store_place(text: str | Path | StoreUrl, **cache: object) -> StorePlace:
    """Read where a store is: a path, `file:///PATH`, or a URL as `StoreUrl` has it, with its other fields.

    Raises StoreUrlError if it is none of these; a path is taken as it is.
    """
    if not isinstance(text, str):
        return text
    scheme, separator, _ = text.partition("://")
    if not separator:
        return Path(text)
    if scheme == "file":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or not parts.path:
            raise StoreUrlError(f"store {cut(_without_secrets(text))!r}: allowed is {_ALLOWED}")
        return Path(unquote(parts.path))
    try:
        return StoreUrl.model_validate({"url": text.rstrip("/"), **cache})
    except ValidationError as error:
        raise StoreUrlError(f"store: {'; '.join(map(str, schema_errors(error, [StoreUrl])))}") from error


def _without_secrets(url: str) -> str:
    """Leave out what may be a password, or the signature of a URL that was signed."""
    head, separator, rest = url.partition("://")
    place, query, _ = rest.rpartition("@")[2].partition("?")
    return f"{head}{separator}{place}{'?***' if query else ''}"
