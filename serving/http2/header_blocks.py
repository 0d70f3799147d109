"""Header blocks (HPACK, RFC 7541): those that come, decoded once each, and those that go out, made without a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from hpack import Decoder
from hpack.exceptions import HPACKError, OversizedHeaderListError
from hpack.table import HeaderTable

from serving.http2.errors import ErrorCode, Http2Error

Read = TypeVar("Read")
Header = tuple[bytes, bytes]

# The table that a peer gives unless it says otherwise (RFC 9113, section 6.5.2). One that gives less has to be told
# that this is kept to, at the beginning of the next block (RFC 7541, section 4.2); here, that nothing of it is used.
DEFAULT_TABLE_BYTES = 4096
EMPTY_TABLE = b"\x20"
KEPT_BLOCKS = 64
KEPT_BLOCK_BYTES = 512
# Entry 8 of the static table (RFC 7541, appendix A): as it is, and its name alone.
_STATUS_200, _STATUS = b"\x88", b"\x08"


class _WatchedTable(HeaderTable):
    """Counts what changes the meaning of later blocks."""

    changes = 0

    def add(self, name: bytes, value: bytes) -> None:
        self.changes += 1
        super().add(name, value)

    def _shrink(self) -> None:
        self.changes += 1
        super()._shrink()


class HeaderReader(Generic[Read]):
    """Decodes the header blocks of one connection.

    A client's calls differ little: its blocks soon name entries of the table alone and repeat byte by byte. As long as
    the table stays as it is, a block that was read before means the same again.

    Args:
        max_list_bytes: size of a decoded list of headers, as RFC 9113 counts it (section 10.5.1).
        read: makes of a list of headers what is to be known of it, which is not None.

    Attributes:
        known: what was read from blocks that mean the same if they come again.
    """

    def __init__(self, max_list_bytes: int, read: Callable[[list[Header]], Read]) -> None:
        self._decoder = Decoder(max_header_list_size=max_list_bytes)
        self._table = _WatchedTable()
        self._decoder.header_table = self._table
        self._read = read
        self.known: dict[bytes, Read] = {}

    def read(self, block: bytes) -> Read:
        """Decodes a block that is not known. Each such block of a connection must pass through here, in order.

        Raises:
            Http2Error: if it is none, or its headers take too much.
        """
        table = self._table
        before = table.changes, len(table.dynamic_entries)
        try:
            headers = list(self._decoder.decode(block, raw=True))
        except OversizedHeaderListError as error:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, f"the headers take too much: {error}") from error
        except (HPACKError, IndexError) as error:
            raise Http2Error(ErrorCode.COMPRESSION_ERROR, f"a header block can't be decoded: {error}") from error
        # A block that sets the table's size (RFC 7541, section 6.3) does so whatever the table holds by now.
        sets_size = block[:1] and block[0] & 0xE0 == 0x20
        if sets_size or (table.changes, len(table.dynamic_entries)) != before:
            self.known.clear()
            return self._read(headers)  # type: ignore[arg-type]  # raw headers are bytes
        read = self._read(headers)  # type: ignore[arg-type]
        if len(self.known) < KEPT_BLOCKS and len(block) <= KEPT_BLOCK_BYTES:
            self.known[block] = read
        return read


def header_block(headers: Iterable[Header], *, status: int | None) -> bytes:
    """A block of literals that leaves the peer's table as it is, after `:status` if there is one."""
    first = b""
    if status is not None:
        first = _STATUS_200 if status == 200 else _STATUS + _string(str(status).encode())
    return first + b"".join(b"\x00" + _string(name) + _string(value) for name, value in headers)


def _string(text: bytes) -> bytes:
    # RFC 7541, section 5.1: an integer with a prefix of seven bits; the eighth would say Huffman.
    size = len(text)
    if size < 127:
        return bytes((size,)) + text
    size, digits = size - 127, bytearray(b"\x7f")
    while size >= 128:
        digits.append(size & 127 | 128)
        size >>= 7
    digits.append(size)
    return bytes(digits) + text
