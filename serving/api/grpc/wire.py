"""The vocabulary of HTTP/2: frames (RFC 9113), header blocks (HPACK, RFC 7541), limits and errors.

Header blocks that go out are made without a table. The decoder of those that come takes a fifth to a third of the time
of `hpack.Decoder`, whose tables it uses: each call's head is another one.
"""

from __future__ import annotations

import enum
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from hpack.exceptions import HPACKDecodingError
from hpack.hpack import encode_integer
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

from serving.errors import InternalError

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, HAS_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = (
    range(1, 7)
)
DEFAULT_WINDOW, DEFAULT_FRAME_SIZE = 65_535, 16_384
MAX_WINDOW = MAX_STREAM_ID = 2**31 - 1
MAX_GOAWAY_BYTES, MAX_FRAME_BYTES = 256, 2**24 - 1
# Length as 16 high and 8 low bits, type, flags, stream id with a reserved bit.
FRAME_HEAD = struct.Struct(">HBBBI")
HEAD_BYTES = FRAME_HEAD.size
_pack_head = FRAME_HEAD.pack
_SETTING = struct.Struct(">HI")
_TWO_WORDS = struct.Struct(">II")

Header = tuple[bytes, bytes]
_Bytes = TypeVar("_Bytes", bytes, memoryview)

ENTRY_OVERHEAD_BYTES = 32
# The table that a peer gives unless it says otherwise (RFC 9113, section 6.5.2). One that gives less has to be told
# that this is kept to, at the beginning of the next block (RFC 7541, section 4.2); here, that nothing of it is used.
DEFAULT_TABLE_BYTES = 4096
EMPTY_TABLE = b"\x20"
# Entry 8 of the static table (RFC 7541, appendix A): as it is, and its name alone.
_STATUS_200, _STATUS = b"\x88", b"\x08"
_MAX_SHIFT = 28

_NEEDED = (b":method", b":scheme", b":path")
_PSEUDO_HEADERS = frozenset((*_NEEDED, b":authority"))
_OF_A_CONNECTION = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))
# RFC 9113, section 8.2.1: names are visible ASCII but upper case and the colon; values hold no NUL, CR or LF, and
# neither begin nor end with white space.
_NAME = re.compile(rb":?[!-9;-@\[-~]+")
_WRONG_IN_VALUE = re.compile(rb"[\0\r\n]|\A[ \t]|[ \t]\Z")


class ErrorCode(enum.IntEnum):
    """Error codes of RFC 9113, section 7, that are sent here."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class Http2Error(InternalError, kind="http2"):
    """The peer broke the protocol or a limit in a way that ends the connection; GOAWAY tells it the code and why."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


# By setting: from, to, and what another value is (RFC 9113, section 6.5.2).
_ANY = (0, 2**32 - 1, ErrorCode.PROTOCOL_ERROR)
_ALLOWED = {
    ENABLE_PUSH: (0, 1, ErrorCode.PROTOCOL_ERROR),
    INITIAL_WINDOW_SIZE: (0, MAX_WINDOW, ErrorCode.FLOW_CONTROL_ERROR),
    MAX_FRAME_SIZE: (DEFAULT_FRAME_SIZE, MAX_FRAME_BYTES, ErrorCode.PROTOCOL_ERROR),
}


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How many connections there may be, and what one of them may use.

    Attributes:
        max_idle_work_s: work that it may cause without a call that is completed.
        max_header_bytes: of one request, as RFC 9113 counts them (section 10.5.1); whoever reads it refuses more.
        patience_s: for the peer's first frames, and for any frame after a ping, which it is sent at this interval.
            A stream whose data it does not let go on for twice as long is dropped.
        idle_s, age_s: time without a stream, and time at all, after which it is asked to go.
        grace_s: how long the streams of a connection that was asked to go may take.
    """

    max_connections: int
    max_streams: int
    max_header_bytes: int
    max_idle_work_s: float
    patience_s: float
    idle_s: float
    age_s: float
    grace_s: float
    stream_window: int = 2**20
    connection_window: int = 2**24
    frame_size: int = 2**15

    @property
    def max_block_bytes(self) -> int:
        """Of a header block that is still read, for its request alone to be refused; others share the connection."""
        return 2 * self.max_header_bytes


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Return a frame."""
    size = len(payload)
    return _pack_head(size >> 8, size & 0xFF, kind, flags, stream_id) + payload


def settings(values: dict[int, int]) -> bytes:
    """Return a SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(name, value) for name, value in values.items()))


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """Return the settings of a frame. Raises Http2Error for values that RFC 9113, section 6.5.2, does not allow."""
    if len(payload) % _SETTING.size:
        raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes; it must be a multiple of 6")
    values = list(_SETTING.iter_unpack(payload))
    for name, value in values:
        low, high, code = _ALLOWED.get(name, _ANY)
        if not low <= value <= high:
            raise Http2Error(code, f"the setting {name} is {value}; allowed are {low} to {high}")
    return values


def window_update(stream_id: int, increment: int) -> bytes:
    """Return a WINDOW_UPDATE frame; stream 0 is the connection."""
    return frame(WINDOW_UPDATE, 0, stream_id, increment.to_bytes(4, "big"))


def rst_stream(stream_id: int, code: ErrorCode) -> bytes:
    """Return a RST_STREAM frame."""
    return frame(RST_STREAM, 0, stream_id, code.to_bytes(4, "big"))


def goaway(last_stream_id: int, code: ErrorCode, message: str = "") -> bytes:
    """Return a GOAWAY frame: streams after the last one were not and will not be processed. A long message is cut."""
    reason = message.encode("utf-8", "replace")[:MAX_GOAWAY_BYTES]
    return frame(GOAWAY, 0, 0, _TWO_WORDS.pack(last_stream_id, code) + reason)


def unpadded(flags: int, payload: _Bytes) -> _Bytes:
    """Cut padding and priority from a frame's payload. Raises Http2Error if they do not fit in it."""
    start, end = 0, len(payload)
    if flags & PADDED:
        if not payload:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "a padded frame without the length of its padding")
        start, end = 1, end - payload[0]
    if flags & HAS_PRIORITY:
        start += 5
    if start > end:
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a frame whose padding and priority are longer than itself")
    return payload[start:end]


class HeaderList(NamedTuple):
    """The headers of one block, and their bytes as RFC 9113 counts them (section 10.5.1).

    `problem` is why a request with them is malformed (sections 8.2 and 8.3), or None.
    """

    headers: list[Header]
    size: int
    problem: str | None = None


_Entry = tuple[Header, int, str | None]


def _shown(text: bytes) -> str:
    return repr(text[:64].decode("latin-1"))


def _entry(name: bytes, value: bytes) -> _Entry:
    """Check a header by itself. Called for each literal, not each time the table names it."""
    problem = None
    if _NAME.fullmatch(name) is None:
        problem = f"the name of the header {_shown(name)} has a character that is not allowed"
    elif _WRONG_IN_VALUE.search(value) is not None:
        problem = f"the header {_shown(name)}: {_shown(value)} has a character where it is not allowed"
    elif name in _OF_A_CONNECTION or (name == b"te" and value != b"trailers"):
        problem = f"the header {_shown(name)}: {_shown(value)} is none of HTTP/2"
    return (name, value), len(name) + len(value) + ENTRY_OVERHEAD_BYTES, problem


_STATIC: list[_Entry] = [_entry(name, value) for name, value in HeaderTable.STATIC_TABLE]
_FIRST_DYNAMIC = 1 + len(_STATIC)


class HeaderDecoder:
    """Decodes the header blocks of one connection, each of them, in their order."""

    def __init__(self, max_list_bytes: int) -> None:
        self._max_list_bytes = max_list_bytes
        # By index: nothing, the static entries, the others from the newest on.
        self._table: list[_Entry | None] = [None, *_STATIC]
        self._table_bytes = 0
        self._max_table_bytes = DEFAULT_TABLE_BYTES

    def decode(self, block: bytes, *, is_request: bool = True) -> HeaderList:
        """Decode the block of a request, or of trailers. Raises Http2Error; the decoder is of no use after it."""
        table, total, problem = self._table, 0, None
        headers: list[Header] = []
        at, end = 0, len(block)
        try:
            while at < end:
                first = block[at]
                if first >= 0x80:
                    index, at = (first & 0x7F, at + 1) if first < 0xFF else _integer(block, at, 0x7F)
                    entry = table[index]
                elif 0x20 <= first < 0x40:
                    size, at = _integer(block, at, 0x1F)
                    if headers or size > DEFAULT_TABLE_BYTES:
                        raise _undecodable(f"it sets a table of {size} bytes, or does so behind a header")
                    self._max_table_bytes = size
                    self._evict(0)
                    continue
                else:
                    index, at = _integer(block, at, 0x3F if first >= 0x40 else 0x0F)
                    name, at = (table[index][0][0], at) if index else _string(block, at)  # type: ignore[index]
                    value, at = _string(block, at)
                    entry = _entry(name, value)
                    if first >= 0x40:
                        self._evict(entry[1])
                        # One that is larger than the table empties it (RFC 7541, section 4.4).
                        if entry[1] <= self._max_table_bytes:
                            table.insert(_FIRST_DYNAMIC, entry)
                            self._table_bytes += entry[1]
                if entry is None:
                    raise _undecodable("it names entry 0")
                header, size, wrong = entry
                headers.append(header)
                total += size
                if total > self._max_list_bytes:
                    limit = f"the headers take more than {self._max_list_bytes} bytes"
                    raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, limit)
                problem = problem or wrong
        except IndexError:
            raise _undecodable("it ends too early, or names an entry that there is not") from None
        if is_request and problem is None:
            problem = _request_problem(headers)
        return HeaderList(headers, total, problem)

    def _evict(self, room: int) -> None:
        table = self._table
        while self._table_bytes + room > self._max_table_bytes and len(table) > _FIRST_DYNAMIC:
            self._table_bytes -= table.pop()[1]  # type: ignore[index]  # only entry 0 is None


def _request_problem(headers: list[Header]) -> str | None:
    """Return what makes a request's headers malformed: proxies route by them too, so all must read them alike."""
    seen: dict[bytes, bytes] = {}
    has_others = False
    for name, value in headers:
        if name[0] != 0x3A:
            has_others = True
        elif name not in _PSEUDO_HEADERS or name in seen or has_others:
            return f"the header {_shown(name)} is unknown, there twice, or behind others"
        else:
            seen[name] = value
    for name in _NEEDED:
        if not seen.get(name):
            return f"the header {_shown(name)} is missing or empty"
    return None


def header_block(headers: Iterable[Header], *, status: int | None) -> bytes:
    """Return a block of literals that leaves the peer's table as it is, after `:status` if there is one."""
    first = b""
    if status is not None:
        first = _STATUS_200 if status == 200 else _STATUS + _literal(str(status).encode())
    return first + b"".join(b"\x00" + _literal(name) + _literal(value) for name, value in headers)


def _integer(block: bytes, at: int, prefix: int) -> tuple[int, int]:
    """Return an integer that begins in a byte's last bits (RFC 7541, section 5.1), and where it ends."""
    value, shift = block[at] & prefix, 0
    at += 1
    if value < prefix:
        return value, at
    while True:
        digit = block[at]
        at += 1
        value += (digit & 0x7F) << shift
        if digit < 0x80:
            return value, at
        shift += 7
        if shift > _MAX_SHIFT:
            raise _undecodable("an integer of it is too long")


def _string(block: bytes, at: int) -> tuple[bytes, int]:
    first, (size, at) = block[at], _integer(block, at, 0x7F)
    end = at + size
    if end > len(block):
        raise _undecodable("it ends within a string")
    text = block[at:end]
    if first < 0x80:
        return text, end
    try:
        return decode_huffman(text), end
    except HPACKDecodingError as error:
        raise _undecodable(f"a Huffman-coded string of it: {error}") from None


def _literal(text: bytes) -> bytes:
    return bytes(encode_integer(len(text), 7)) + text


def _undecodable(problem: str) -> Http2Error:
    return Http2Error(ErrorCode.COMPRESSION_ERROR, f"a header block can't be decoded: {problem}")
