"""Where a store is: a folder, or a URL with the folder that its versions are synced into."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

import xxhash
from pydantic import Field, field_validator

from loader.errors import StoreError, cut
from loader.registry.registry import local_path, without_password
from loader.snapshot.tables import Frozen, refused_as

DEFAULT_CACHE_BYTES: Final = 100 * 10**9
FETCHING: Final = "fetching from the store"
"""What a fetch reports its progress of, in bytes."""
_URL: Final = re.compile(r"(s3|gs|az)://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9](/(?!\.\.?(/|$))[A-Za-z0-9_.=+-]+)*")
_ALLOWED: Final = (
    "allowed is s3://, gs:// or az://BUCKET[/PREFIX], a prefix of letters, digits and _ . = + - between slashes; "
    "file:///PATH, or a path; credentials are taken from the environment"
)


class StoreUrl(Frozen):
    """A store at a URL.

    Attributes:
        url: `s3://BUCKET[/PREFIX]`, `gs://BUCKET[/PREFIX]` or `az://CONTAINER[/PREFIX]`.
        cache: the folder that versions are synced into; processes of one machine may share it.
        cache_bytes: its limit.
        timeout_s: of one request, its retries included.
    """

    url: str
    cache: Path = Field(
        default_factory=lambda: Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "shardrank", "stores")
    )
    cache_bytes: int = Field(default=DEFAULT_CACHE_BYTES, ge=1)
    timeout_s: float = Field(default=60.0, gt=0, le=3600)

    @field_validator("url")
    @classmethod
    def _check(cls, url: str) -> str:
        if not _URL.fullmatch(url):
            # A query may be the signature of a URL that was signed.
            raise ValueError(f"{cut(without_password(url).partition('?')[0])}: {_ALLOWED}")
        return url

    def __str__(self) -> str:
        """Return the URL, which has no secret in it."""
        return self.url

    @property
    def exports(self) -> Path:
        """The folder in which new versions of this store are made; not counted as the cache."""
        return self.cache / "exports" / xxhash.xxh3_64_hexdigest(self.url.encode())


StorePlace: TypeAlias = Path | StoreUrl


def store_place(text: str | Path | StoreUrl, **cache: object) -> StorePlace:
    """Read where a store is: a path, `file:///PATH`, or a URL as `StoreUrl` has it, with its other fields.

    Raises StoreError of the kind `store_url` if it is none of these.
    """
    if not isinstance(text, str):
        return text
    if (path := local_path(text)) is not None:
        return path
    with refused_as(partial(StoreError, kind="store_url"), "store: ", StoreUrl):
        return StoreUrl.model_validate({"url": text.rstrip("/"), **cache})
