"""Where a shard node listens: a TCP host and port, or the path of a Unix socket."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shard_node.errors import AddressError

MAX_PORT = 65_535
# Linux's sun_path holds 108 bytes, the last of them a zero.
MAX_UNIX_PATH_BYTES = 107

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
        """Reads `tcp://host:port`, `host:port`, `unix:/path` or `unix:///path`; an IPv6 host stands in brackets.

        Raises:
            AddressError: naming the text and what is allowed.
        """
        if text.startswith("unix:"):
            return cls(path=_unix_path(text))
        match = _TCP.match(text)
        if match is None:
            raise AddressError(
                f"address {text!r} is none of 'tcp://host:port', 'host:port', 'unix:/path', 'unix:///path'"
            )
        port = int(match["port"])
        if port > MAX_PORT:
            raise AddressError(f"address {text!r}: port {port} is not within 0..{MAX_PORT}")
        return cls(host=match["ipv6"] or match["host"], port=port)

    @property
    def is_unix(self) -> bool:
        """Whether it is a Unix socket."""
        return bool(self.path)

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


def _unix_path(text: str) -> str:
    path = text.removeprefix("unix:")
    if path.startswith("//"):
        path = path.removeprefix("//")
    if not path.startswith("/") or path.startswith("//") or path.endswith("/") or "\0" in path:
        raise AddressError(f"address {text!r}: a Unix socket needs an absolute path of a file, as in 'unix:/run/node'")
    size = len(path.encode())
    if size > MAX_UNIX_PATH_BYTES:
        raise AddressError(
            f"address {text!r}: the path has {size} bytes, a Unix socket takes at most {MAX_UNIX_PATH_BYTES}"
        )
    return path
