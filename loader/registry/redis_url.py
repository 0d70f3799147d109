"""Read the URL of a Redis: redis-py's, with a fleet, files of passwords, and sentinels.

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
from urllib.parse import parse_qsl, unquote, urlsplit

from redis.asyncio.connection import parse_url

from loader.errors import RegistryRecordError, cut
from loader.registry.registry import without_password

_TLS_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_SENTINEL_OPTIONS: Final = ("sentinel_user", "sentinel_password_file")
_OPTIONS: Final = ("fleet", *_TLS_FILES, "password_file")
MAX_SENTINELS: Final = 16
_DATABASE: Final = r"/?(?P<database>[0-9]{0,5})"
_PATHS: Final = {
    "unix": (r"/.+", "unix:///PATH of a socket"),
    "sentinel": (rf"/(?P<master>[A-Za-z0-9_.\-]{{1,256}})(?:{_DATABASE})?", "a host and /MASTER[/DB] with a number DB"),
    **dict.fromkeys(("redis", "rediss"), (_DATABASE, "a host without a path or with a number /DB")),
}
"""By scheme, the pattern of a path, and how it is called."""


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """What a URL says.

    Attributes:
        name: its text without the password.
        fleet: whose keys.
        connection: redis-py's arguments of a connection; with sentinels it has no host.
        sentinels: host and port of each; () without.
        master: the name by which sentinels know it.
        sentinel_connection: redis-py's arguments of connections to sentinels.
    """

    name: str
    fleet: str
    connection: dict[str, Any] = field(repr=False)
    sentinels: tuple[tuple[str, int], ...] = ()
    master: str = ""
    sentinel_connection: dict[str, Any] = field(default_factory=dict, repr=False)


def parse_redis_url(url: str) -> RedisUrl:
    """Read a URL. Raises RegistryRecordError, without the password, if it is not one."""
    try:
        parts = urlsplit(url)
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        scheme, _, kind = parts.scheme.partition("+")
        login, at, hosts = parts.netloc.rpartition("@")
        sentinels = [parse_url(f"redis://{host}") for host in hosts.split(",") if kind]
        addresses = tuple((sentinel["host"], sentinel.get("port", 26379)) for sentinel in sentinels)
        connection: dict[str, Any] = {**parse_url(f"{scheme}://{login}{at}{'' if kind else hosts}")}
        if len(sentinels) > MAX_SENTINELS:
            raise ValueError("too many sentinels")
    except (ValueError, KeyError):
        # Nothing of it is told: a password may stand where it does not belong.
        raise RegistryRecordError(
            f"registry URL {url.partition(':')[0]}://***: it can't be read as a URL; "
            "SCHEME://[[USER]:PASSWORD@]HOST[:PORT][/DB][?OPTION=VALUE&...] is one, special characters "
            "percent-encoded; "
            f"redis+sentinel://[...@]HOST[:PORT][,HOST[:PORT]...]/MASTER[/DB] with at most {MAX_SENTINELS} hosts"
        ) from None
    name, options, allowed = without_password(url), dict(pairs), _OPTIONS + (_SENTINEL_OPTIONS if kind else ())
    pattern, form = _PATHS[kind or scheme]
    try:
        if len(options) != len(pairs) or (set(options) - set(allowed)) or parts.fragment:
            given = [cut(option, 40) for option, _ in pairs]
            raise ValueError(f"allowed are the options {list(allowed)}, each once; given are {given}")
        if not re.fullmatch(r"[A-Za-z0-9_.\-]{1,64}", fleet := options.get("fleet", "default")):
            raise ValueError(f"fleet {cut(repr(fleet))}; allowed are 1 to 64 characters out of A-Z a-z 0-9 _ . -")
        if (path := re.fullmatch(pattern, parts.path)) is None or bool(hosts) == (scheme == "unix"):
            raise ValueError(f"{form} is needed")
        connection |= {"path": unquote(parts.path)} if scheme == "unix" else {"db": int(path["database"] or 0)}
        tls = _tls_files(scheme, options)
        connection |= _login(connection.get("username"), connection.get("password"), "password_file", options) | tls
        sentinel_login = _login(options.get("sentinel_user"), None, "sentinel_password_file", options)
    except ValueError as error:
        raise RegistryRecordError(f"registry URL {cut(name)}: {error}") from None
    master = path["master"] if kind else ""
    return RedisUrl(name, fleet, connection, addresses, master, {**sentinel_login, **tls, "ssl": scheme == "rediss"})


def _login(user: str | None, password: str | None, option: str, options: dict[str, str]) -> dict[str, Any]:
    """Return the user and the password, which may be in the file that an option names."""
    if option in options:
        if password is not None:
            raise ValueError(f"a password and a {option}; one is allowed")
        try:
            password = Path(options[option]).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{option}: {error.strerror if isinstance(error, OSError) else 'not UTF-8'}") from None
        if not password:
            raise ValueError(f"{option}: it is empty")
    if user and not password:
        raise ValueError(f"a user without a password or {option}; redis://:PASSWORD@HOST is a password alone")
    return {key: value for key, value in (("username", user), ("password", password)) if value}


def _tls_files(scheme: str, options: dict[str, str]) -> dict[str, Any]:
    """Return redis-py's arguments for the files of TLS, which can be read and fit together."""
    files: dict[str, Any] = {option: options[option] for option in _TLS_FILES if option in options}
    if files and scheme != "rediss":
        raise ValueError(f"{', '.join(files)}: only for rediss://")
    if ("ssl_certfile" in files) != ("ssl_keyfile" in files):
        raise ValueError("ssl_certfile and ssl_keyfile belong together")
    try:
        context = ssl.create_default_context(cafile=files.get("ssl_ca_certs"))
        if "ssl_certfile" in files:
            # Without a password OpenSSL would ask for one at the terminal.
            files["ssl_password"] = ""
            context.load_cert_chain(files["ssl_certfile"], files["ssl_keyfile"], "")
    except OSError as error:
        reason = (error.reason if isinstance(error, ssl.SSLError) else error.strerror) or error
        names = ", ".join(f"{option} {cut(path)}" for option, path in files.items() if path)
        raise ValueError(f"{names}: {reason}") from None
    return files
