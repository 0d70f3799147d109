"""Read the URL of a Redis: where it is or who knows where, whose keys, credentials, TLS.

```
redis://[[USER]:PASSWORD@]HOST[:PORT][/DB]                              rediss:// with TLS
redis+sentinel://[[USER]:PASSWORD@]HOST[:PORT][,HOST[:PORT]...]/MASTER[/DB]   rediss+sentinel:// with TLS
unix://[[USER]:PASSWORD@]/path/to/socket
```

With Sentinel the hosts are the sentinels, of port 26379, and the credentials those of Redis. Options are `fleet`,
`password_file`, for TLS `ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile`, and for sentinels that have a password of
their own `sentinel_user` and `sentinel_password_file`. Passwords stay out of messages.
"""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from loader.errors import RegistryRecordError, cut
from loader.registry.registry import without_password

_TLS_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
"""Options of `rediss://`, by the names of redis-py."""
_SENTINEL_OPTIONS: Final = ("sentinel_user", "sentinel_password_file")
_OPTIONS: Final = ("fleet", *_TLS_FILES, "password_file", *_SENTINEL_OPTIONS)
_PORT: Final = 6379
_SENTINEL_PORT: Final = 26379
MAX_SENTINELS: Final = 16
_SENTINEL = re.compile(r"(?:\[(?P<ipv6>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^\s:/\[\]@,]+))(?::(?P<port>[0-9]{1,5}))?")


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """What a URL says.

    Attributes:
        name: its text without the password.
        scheme: `redis`, `rediss` or `unix`.
        fleet: whose keys.
        connection: arguments of the client's connection; with sentinels it has no host.
        sentinels: host and port of each; () without.
        master: the name by which sentinels know it.
        sentinel_connection: arguments of connections to sentinels.
    """

    name: str
    scheme: str
    fleet: str
    connection: dict[str, Any] = field(repr=False)
    sentinels: tuple[tuple[str, int], ...] = ()
    master: str = ""
    sentinel_connection: dict[str, Any] = field(default_factory=dict, repr=False)


def parse_redis_url(url: str) -> RedisUrl:
    """Read a URL. Raises RegistryRecordError, without the password, if it is not one."""
    name = without_password(url)
    try:
        parts = urlsplit(url)
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        scheme, _, kind = parts.scheme.partition("+")
        sentinels = _sentinels(parts) if kind else ()
        port = _PORT if kind or parts.port is None else parts.port
    except ValueError:
        # Nothing of it is told: a password may stand where it does not belong.
        raise RegistryRecordError(
            f"registry URL {url.partition(':')[0]}://***: it can't be read as a URL; "
            "SCHEME://[[USER]:PASSWORD@]HOST[:PORT][/DB][?OPTION=VALUE&...] is one, special characters "
            "percent-encoded; "
            f"redis+sentinel://[...@]HOST[:PORT][,HOST[:PORT]...]/MASTER[/DB] with at most {MAX_SENTINELS} hosts"
        ) from None
    options = dict(pairs)
    try:
        if len(options) != len(pairs) or (set(options) - set(_OPTIONS)) or parts.fragment:
            found = [cut(key, 40) for key, _ in pairs]
            raise ValueError(f"allowed are the options {list(_OPTIONS)}, each once; found are {found}")
        if not kind and (wrong := [name for name in _SENTINEL_OPTIONS if name in options]):
            raise ValueError(f"{', '.join(wrong)}: only for {scheme}+sentinel://")
        fleet = options.get("fleet", "default")
        if not re.fullmatch(r"[A-Za-z0-9_.\-]{1,64}", fleet):
            raise ValueError(f"fleet {cut(repr(fleet))}; allowed are 1 to 64 characters out of A-Z a-z 0-9 _ . -")
        tls = _tls(scheme, options)
        login = _credentials("", unquote(parts.username or ""), unquote(parts.password or ""), options)
        if not kind:
            return RedisUrl(name, scheme, fleet, _place(parts, port) | login | tls)
        master, database = _master(parts.path)
        to_sentinels = _credentials("sentinel_", options.get("sentinel_user"), None, options) | tls
        return RedisUrl(name, scheme, fleet, {"db": database} | login | tls, sentinels, master, to_sentinels)
    except ValueError as error:
        raise RegistryRecordError(f"registry URL {cut(name)}: {error}") from None


def _place(parts: SplitResult, port: int) -> dict[str, Any]:
    if parts.scheme == "unix":
        if parts.hostname or not parts.path:
            raise ValueError("unix:///PATH of a socket is needed")
        return {"path": unquote(parts.path)}
    if not parts.hostname:
        raise ValueError("a host is needed")
    return {"host": parts.hostname, "port": port, "db": _database(parts.path.removeprefix("/"))}


def _database(text: str) -> int:
    if text and not re.fullmatch(r"[0-9]{1,5}", text):
        raise ValueError(f"database {cut(repr(text))}; allowed is a number")
    return int(text or 0)


def _sentinels(parts: SplitResult) -> tuple[tuple[str, int], ...]:
    """Hosts and ports of a list. Raises ValueError, which may have a password in it, for what is none."""
    found = []
    for text in parts.netloc.rpartition("@")[2].split(","):
        if (match := _SENTINEL.fullmatch(text)) is None or int(match["port"] or 0) > 65535:
            raise ValueError(f"sentinel {text!r}")
        found.append((match["ipv6"] or match["host"], int(match["port"] or _SENTINEL_PORT)))
    if len(found) > MAX_SENTINELS:
        raise ValueError(f"{len(found)} sentinels")
    return tuple(found)


def _master(path: str) -> tuple[str, int]:
    name, _, database = path.removeprefix("/").partition("/")
    if not re.fullmatch(r"[A-Za-z0-9_.\-]{1,256}", name):
        raise ValueError(f"master {cut(repr(name))}; /NAME by which the sentinels know it is needed, as in /mymaster/0")
    return name, _database(database)


def _credentials(prefix: str, user: str | None, password: str | None, options: dict[str, str]) -> dict[str, Any]:
    """User and password; the file that may have it is the option `<prefix>password_file`."""
    user, password = user or None, password or None
    if (path := options.get(option := f"{prefix}password_file")) is not None:
        if password is not None:
            raise ValueError(f"a password and a {option}; one is allowed")
        try:
            password = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ValueError(f"{option}: {reason}") from None
        if not password:
            raise ValueError(f"{option}: it is empty")
    if user is not None and password is None:
        hint = "" if prefix else "; redis://:PASSWORD@HOST gives a password alone"
        raise ValueError(f"a {prefix}user without a password{hint}")
    return {key: value for key, value in (("username", user), ("password", password)) if value is not None}


def _tls(scheme: str, options: dict[str, str]) -> dict[str, Any]:
    files: dict[str, Any] = {option: options[option] for option in _TLS_FILES if option in options}
    if scheme != "rediss":
        if files:
            raise ValueError(f"{', '.join(files)}: only for rediss://")
        return {}
    for option, path in files.items():
        if not Path(path).is_file():
            raise ValueError(f"{option} {cut(path)}: there is no such file")
    cert, key = files.get("ssl_certfile"), files.get("ssl_keyfile")
    if (cert is None) != (key is None):
        raise ValueError("ssl_certfile and ssl_keyfile belong together")
    if cert is not None:
        # Without a password OpenSSL would ask for one at the terminal.
        files["ssl_password"] = ""
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(cert, key, "")
        except OSError as error:
            reason = (error.reason if isinstance(error, ssl.SSLError) else error.strerror) or error
            raise ValueError(f"ssl_certfile {cut(cert)} with ssl_keyfile {cut(key)}: {reason}") from None
    return {"ssl_cert_reqs": "required", "ssl_check_hostname": True} | files
