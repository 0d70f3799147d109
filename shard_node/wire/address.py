"""Where a shard node listens, a TCP host and port or the path of a Unix socket; and listening there."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
import socket
import stat
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from loader.errors import ConfigError

MAX_PORT = 65_535
# Linux's sun_path holds 108 bytes, the last of them a zero.
MAX_UNIX_PATH_BYTES = 107
BACKLOG = 1024
UNIX_SOCKET_MODE = 0o600

_TCP = re.compile(r"^(?:tcp://)?(?:\[(?P<ipv6>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^\s:/\[\]@?#]+)):(?P<port>[0-9]{1,5})$")


@dataclass(frozen=True, slots=True)
class Address:
    """One address; `path` is empty for TCP, `host` is empty for a Unix socket.

    Port 0 asks a server for any free port. `str()` gives a form that `parse` takes back.
    """

    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read `tcp://host:port`, `host:port`, `unix:/path` or `unix:///path`; an IPv6 host stands in brackets.

        Raises ConfigError, naming the text and what is allowed.
        """
        if text.startswith("unix:"):
            path = text.removeprefix("unix:").removeprefix("//")
            if not path.startswith("/") or path.startswith("//") or path.endswith("/") or "\0" in path:
                needed = "a Unix socket needs an absolute path of a file, as in 'unix:/run/node'"
                raise ConfigError(f"address {text!r}: {needed}")
            if (size := len(path.encode())) > MAX_UNIX_PATH_BYTES:
                limit = f"a Unix socket takes at most {MAX_UNIX_PATH_BYTES}; those of `up` lie in TMPDIR"
                raise ConfigError(f"address {text!r}: the path has {size} bytes, {limit}")
            return cls(path=path)
        if (match := _TCP.match(text)) is None:
            forms = "'tcp://host:port', 'host:port', 'unix:/path', 'unix:///path'"
            raise ConfigError(f"address {text!r} is none of {forms}")
        port = int(match["port"])
        if port > MAX_PORT:
            raise ConfigError(f"address {text!r}: port {port} is not within 0..{MAX_PORT}")
        return cls(host=match["ipv6"] or match["host"], port=port)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it. A name other than `localhost` is not looked up."""
        try:
            return self.is_unix or ipaddress.ip_address(self.host.partition("%")[0]).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def is_unix(self) -> bool:
        """Whether it is a Unix socket."""
        return bool(self.path)

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


async def bind(address: Address) -> list[socket.socket]:
    """Return sockets that listen on an address, port 0 for any free one; several for a name with several addresses.

    Raises ConfigError if it can't be bound, naming the address and the reason.
    """
    try:
        if address.is_unix:
            return [_bind_unix(address)]
        loop = asyncio.get_running_loop()
        resolved = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        with ExitStack() as undo:
            names = dict.fromkeys((family, name) for family, _, _, _, name in resolved)
            sockets = [
                undo.enter_context(socket.create_server(name, family=family, backlog=BACKLOG)) for family, name in names
            ]
            undo.pop_all()
        return sockets
    except OSError as error:
        raise ConfigError(f"can't listen on {address}: {error}") from error


def _bind_unix(address: Address) -> socket.socket:
    try:
        if not stat.S_ISSOCK(os.lstat(address.path).st_mode):
            raise ConfigError(f"can't listen on {address}: there is a file that is not a socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            # One whose queue of connections is full is a BlockingIOError: it listens, and is busy.
            with suppress(BlockingIOError):
                probe.connect(address.path)
        raise ConfigError(f"can't listen on {address}: another process listens there")
    except ConnectionRefusedError:
        # It is what a process that died has left.
        os.unlink(address.path)
    except FileNotFoundError:
        pass
    with ExitStack() as undo:
        sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        sock.bind(address.path)
        # Nobody can connect before listen(), so the permissions are right from the first moment.
        os.chmod(address.path, UNIX_SOCKET_MODE)
        sock.listen(BACKLOG)
        undo.pop_all()
    return sock
