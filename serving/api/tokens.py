"""Tokens of the public APIs: the file that lists them, who may do what, and how one is made.

The file is JSON, `{"tokens": [{"name": "shop", "sha256": "<64 hex digits>", "scope": "rank"}, ...]}`. It holds the
SHA-256 of each token and not the token. That is enough, without salt or a slow hash, because a token is 256 random
bits: nobody can guess one from its hash. A client sends `Authorization: Bearer <token>`, over gRPC as metadata.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final, Literal, Self, TypeAlias

from pydantic import Field, StringConstraints, ValidationError, model_validator

from loader.errors import ConfigError, ShardrankError
from loader.snapshot.store import replace_file
from loader.snapshot.tables import Frozen, quoted_errors
from serving.errors import PermissionDeniedError, UnauthenticatedError
from shard_node.wire.tls import FileBacked

Scope: TypeAlias = Literal["rank", "describe", "admin"]
"""What a token is good for. `describe`: models' descriptions, metadata and statistics. `rank`: rank, lookup and infer,
and `describe`. `admin`: everything, metrics too. Health probes need no token, but name no model without one."""

MAX_TOKENS: Final = 256
MAX_FILE_BYTES: Final = 1 << 18
MAX_HEADER_CHARS: Final = 1024
PREFIX: Final = "shardrank_"
"""By which programs that look for leaked secrets, and people, know what it is."""

_ALLOWS: Final[dict[Scope, frozenset[Scope]]] = {
    "rank": frozenset({"rank", "describe"}),
    "describe": frozenset({"describe"}),
    "admin": frozenset({"rank", "describe", "admin"}),
}


class TokenEntry(Frozen):
    """One token: whose it is, the SHA-256 of its ASCII bytes in lower-case hexadecimal, and what it is good for."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.\-]{1,64}$")]
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    scope: Scope


class TokenFile(Frozen):
    """The contents of the file."""

    tokens: tuple[TokenEntry, ...] = Field(max_length=MAX_TOKENS)

    @model_validator(mode="after")
    def _check(self) -> Self:
        for what in ("name", "sha256"):
            values = [getattr(entry, what) for entry in self.tokens]
            if len(set(values)) < len(values):
                raise ValueError(f"two tokens have the same {what}")
        return self


class Tokens:
    """The tokens of a file, which is read again when it changes; `note` is called with the kind of each refusal.

    Thread-safe. Raises ConfigError if the file can't be read; later that keeps the tokens, and logs one warning.
    """

    def __init__(
        self, path: Path, clock: Callable[[], float] = time.monotonic, note: Callable[[str], object] = lambda kind: None
    ) -> None:
        def read() -> list[tuple[bytes, TokenEntry]]:
            return [(bytes.fromhex(entry.sha256), entry) for entry in read_tokens(path).tokens]

        self._entries = FileBacked([path], read, clock)
        self._note = note

    def check(self, authorization: str | None, scope: Scope) -> str:
        """Return the name of a request's token, from the header or metadata `authorization`.

        Raises UnauthenticatedError for no token, or an unknown one; PermissionDeniedError if its scope is too narrow.
        """
        try:
            return self._entry(authorization, scope).name
        except ShardrankError as error:
            self._note(error.kind)
            raise

    def allows(self, authorization: str | None, scope: Scope) -> bool:
        """Return whether `check` would let it pass; a probe that shows no token is no refusal, and is not counted."""
        with suppress(ShardrankError):
            return bool(self._entry(authorization, scope))
        return False

    def _entry(self, authorization: str | None, scope: Scope) -> TokenEntry:
        scheme, _, token = (authorization or "")[:MAX_HEADER_CHARS].partition(" ")
        digest = hashlib.sha256(token.strip(" ").encode("utf-8", "surrogatepass")).digest()
        # All of them, so that how long it takes says nothing of which one it is, or nearly was.
        matches = [entry for known, entry in self._entries.get() if hmac.compare_digest(known, digest)]
        if authorization is None:
            raise UnauthenticatedError("a token is needed: 'Authorization: Bearer TOKEN'")
        if scheme.lower() != "bearer":
            raise UnauthenticatedError("the header 'authorization' is not of the form 'Bearer TOKEN'")
        if not matches:
            raise UnauthenticatedError("the token is not known here")
        match = matches[0]
        if scope not in _ALLOWS[match.scope]:
            raise PermissionDeniedError(f"token {match.name!r} has scope {match.scope!r}; {scope!r} is needed here")
        return match


def read_tokens(path: Path) -> TokenFile:
    """Read a file of tokens. Raises ConfigError, naming the file and what is wrong with it."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: longer than {MAX_FILE_BYTES} bytes")
    try:
        return TokenFile.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(f"{path}: {quoted_errors(error)}") from None


def new_token(name: str, scope: Scope) -> tuple[str, TokenEntry]:
    """Make a random token of 256 bits, and the entry for its file."""
    token = PREFIX + secrets.token_urlsafe(32)
    return token, TokenEntry(name=name, sha256=hashlib.sha256(token.encode()).hexdigest(), scope=scope)


def add_token(path: Path, entry: TokenEntry) -> None:
    """Write an entry into a file, atomically, for its owner alone. Raises ConfigError, also for a name it has."""
    # Where a link leads to, not the link, is replaced.
    path = path.resolve()
    before = read_tokens(path).tokens if path.exists() else ()
    if any(known.name == entry.name for known in before):
        raise ConfigError(f"{path}: there is a token {entry.name!r} already; take its entry out, or use another name")
    if len(before) >= MAX_TOKENS:
        raise ConfigError(f"{path}: at most {MAX_TOKENS} tokens are allowed")
    text = TokenFile(tokens=(*before, entry)).model_dump_json(indent=2) + "\n"
    work = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        work.touch(mode=0o600, exist_ok=False)
        try:
            if path.exists():
                # The owner of the server may be another than the one who adds a token, and must be able to read it.
                shutil.chown(work, path.stat().st_uid, path.stat().st_gid)
            replace_file(path, text.encode(), work)
        finally:
            work.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{path}: can't be written: {error.strerror or error}") from None
