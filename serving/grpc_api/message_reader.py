"""Length-prefixed messages, as gRPC puts them into a stream's data.

The format: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md (Length-Prefixed-Message).
"""

from __future__ import annotations

from serving.api.body_coding import CODINGS, expand_at_once
from serving.errors import BodyTooLargeError, MalformedRequestError
from serving.grpc_api.errors import UnknownCodingError

PREFIX_BYTES = 5
IDENTITY = "identity"
# Of a piece of a message: from here on a view costs less than a copy.
VIEW_BYTES = 4096


class MessageReader:
    """Puts the messages of one stream together.

    Args:
        coding: what the stream's headers say of messages that are flagged as compressed.
        max_bytes: of one message, compressed and not.

    Attributes:
        message: the last one that is complete, as it was sent; whoever takes it sets it to None.
        flag: of it: 0 as it is, 1 compressed.
        missing: bytes of the message under way that have not come; 0 until its length is known.
    """

    __slots__ = ("_coding", "_max_bytes", "_parts", "_prefix", "flag", "message", "missing")

    def __init__(self, coding: str, max_bytes: int) -> None:
        self._coding, self._max_bytes = coding, max_bytes
        self._prefix = b""
        self._parts: list[memoryview | bytearray] = []
        self.flag = 0
        self.message: bytes | None = None
        self.missing = 0

    @property
    def is_between(self) -> bool:
        """Whether no message is under way."""
        return not self._prefix and not self.missing

    def feed(self, data: bytes, start: int, end: int) -> int:
        """Takes bytes up to the end of a message. Returns where it stopped.

        Raises:
            BodyTooLargeError: the message is longer than the limit; it need not have come.
        """
        if not self.missing:
            prefix = data[start : min(end, start + PREFIX_BYTES - len(self._prefix))]
            start += len(prefix)
            if self._prefix:
                prefix = self._prefix + prefix
            if len(prefix) < PREFIX_BYTES:
                self._prefix = prefix
                return start
            self._prefix = b""
            self.flag = prefix[0]
            size = int.from_bytes(prefix[1:], "big")
            if size > self._max_bytes:
                raise BodyTooLargeError("", "max_body_bytes", self._max_bytes, size, "bytes in the message")
            if end - start >= size:
                self.message = data[start : start + size]
                return start + size
            self.missing = size
        size = min(end - start, self.missing)
        part, parts = memoryview(data)[start : start + size], self._parts
        if size >= VIEW_BYTES and 2 * size >= len(data):
            # A view keeps all that came with it, so it is for what is most of that.
            parts.append(part)
        elif parts and isinstance(parts[-1], bytearray):
            # Or else a message that comes in tiny pieces would take many times its length.
            parts[-1] += part
        else:
            parts.append(bytearray(part))
        self.missing -= size
        if not self.missing:
            self.message, self._parts = b"".join(parts), []
        return start + size

    def plain(self, flag: int, message: bytes) -> bytes:
        """A message as it was before it was compressed.

        Raises:
            BodyTooLargeError: it becomes longer than the limit.
            MalformedRequestError: it can't be decompressed.
            UnknownCodingError: it is compressed in a way that is not known.
        """
        if not flag:
            return message
        if flag > 1:
            raise MalformedRequestError("", f"a message's compressed flag is {flag}; allowed are 0 and 1")
        if self._coding == IDENTITY:
            raise MalformedRequestError("", "a message is flagged as compressed, but the call has no grpc-encoding")
        if self._coding not in CODINGS:
            raise UnknownCodingError(self._coding)
        return expand_at_once(message, self._max_bytes)
