"""From a `redis://` URL to the settings of a connection. Passwords stay out of messages and logs."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from loader.errors import RegistryRecordError, cut

REDIS_SCHEMES: Final = ("redis", "rediss", "unix")
DEFAULT_PORT: Final = 6379
_TLS_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
"""Options of `rediss://`, by the names of redis-py."""
_OPTIONS: Final = ("fleet", *_TLS_FILES, "password_file")
_FLEET = re.compile(r"[A-Za-z0-9_.\-]{1,64}\Z")


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """What a URL says.

    Attributes:
        name: the URL without its password.
        scheme: one of `REDIS_SCHEMES`.
        fleet: whose keys; they begin with `shardrank:<fleet>:`.
        connection: arguments of the client's connection, the password among them.
    """

    name: str
    scheme: str
    fleet: str
    connection: dict[str, Any] = field(repr=False)


def parse_redis_url(url: str) -> RedisUrl:
    """Reads a URL. Raises RegistryRecordError, without the password, if it is not one."""
    name = without_password(url)
    try:
        parts = urlsplit(url)
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        port = parts.port
    except ValueError:
        # Nothing of it is told: a password may stand where it does not belong.
        raise RegistryRecordError(
            f"registry URL {url.partition(':')[0]}://***: it can't be read as a URL; "
            "SCHEME://[[USER]:PASSWORD@]HOST[:PORT][/DB][?OPTION=VALUE&...] is one, special characters percent-encoded"
        ) from None
    options = dict(pairs)
    if len(options) != len(pairs) or (set(options) - set(_OPTIONS)) or parts.fragment:
        raise RegistryRecordError(
            f"registry URL {cut(name)}: allowed are the options {list(_OPTIONS)}, each once; found are "
            f"{[cut(key, 40) for key, _ in pairs]}"
        )
    fleet = options.get("fleet", "default")
    if _FLEET.match(fleet) is None:
        raise RegistryRecordError(
            f"registry URL {cut(name)}: fleet {cut(repr(fleet))}; allowed are 1 to 64 characters out of "
            "A-Z a-z 0-9 _ . -"
        )
    place = _unix_socket(name, parts) if parts.scheme == "unix" else _host(name, parts, port)
    return RedisUrl(name, parts.scheme, fleet, place | _credentials(name, parts, options) | _tls(name, parts, options))


def without_password(url: str) -> str:
    """A URL for messages: what stands for a user and a password becomes `***`."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url
    # Up to the last @ before the first / would let a password with a raw / through: up to the last @ of all.
    _, at, place = rest.rpartition("@")
    return f"{scheme}://{'***@' if at else ''}{place}"


def _host(name: str, parts: SplitResult, port: int | None) -> dict[str, Any]:
    if not parts.hostname:
        raise RegistryRecordError(f"registry URL {cut(name)}: a host is needed")
    database = parts.path.removeprefix("/")
    if database and not re.fullmatch(r"[0-9]{1,5}", database):
        raise RegistryRecordError(f"registry URL {cut(name)}: database {cut(repr(database))}; allowed is a number")
    return {
        "host": parts.hostname,
        "port": DEFAULT_PORT if port is None else port,
        "db": int(database or 0),
    }


def _unix_socket(name: str, parts: SplitResult) -> dict[str, Any]:
    if parts.hostname or not parts.path:
        raise RegistryRecordError(f"registry URL {cut(name)}: unix:///PATH of a socket is needed")
    return {"path": unquote(parts.path)}


def _credentials(name: str, parts: SplitResult, options: dict[str, str]) -> dict[str, Any]:
    password = unquote(parts.password) if parts.password else None
    if (path := options.get("password_file")) is not None:
        if password is not None:
            raise RegistryRecordError(f"registry URL {cut(name)}: a password and a password_file; one is allowed")
        try:
            password = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise RegistryRecordError(f"registry URL {cut(name)}: password_file: {reason}") from None
        if not password:
            raise RegistryRecordError(f"registry URL {cut(name)}: password_file: it is empty")
    user = unquote(parts.username) if parts.username else None
    if user is not None and password is None:
        raise RegistryRecordError(
            f"registry URL {cut(name)}: a user without a password; redis://:PASSWORD@HOST gives a password alone"
        )
    return {key: value for key, value in (("username", user), ("password", password)) if value is not None}


def _tls(name: str, parts: SplitResult, options: dict[str, str]) -> dict[str, Any]:
    files = {option: options[option] for option in _TLS_FILES if option in options}
    if parts.scheme != "rediss":
        if files:
            raise RegistryRecordError(f"registry URL {cut(name)}: {', '.join(files)}: only for rediss://")
        return {}
    for option, path in files.items():
        if not Path(path).is_file():
            raise RegistryRecordError(f"registry URL {cut(name)}: {option} {cut(path)}: there is no such file")
    checks = {"ssl_cert_reqs": "required", "ssl_check_hostname": True}
    return checks | files | _client_certificate(name, files.get("ssl_certfile"), files.get("ssl_keyfile"))


def _client_certificate(name: str, cert: str | None, key: str | None) -> dict[str, Any]:
    if (cert is None) != (key is None):
        raise RegistryRecordError(f"registry URL {cut(name)}: ssl_certfile and ssl_keyfile belong together")
    if cert is None:
        return {}
    # Without a password OpenSSL would ask for one at the terminal.
    password = {"ssl_password": ""}
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(cert, key, password["ssl_password"])
    except OSError as error:
        reason = (error.reason if isinstance(error, ssl.SSLError) else error.strerror) or error
        raise RegistryRecordError(
            f"registry URL {cut(name)}: ssl_certfile {cut(cert)} with ssl_keyfile {cut(key)}: {reason}"
        ) from None
    return password
