"""Compressed request bodies, within the limit of what they may become."""

from __future__ import annotations

import zlib

from serving.errors import BodyTooLargeError, MalformedRequestError
from serving.formats.requests import Buffer

CODINGS = ("gzip", "deflate")
# By the header that the data begin with: https://www.zlib.net/manual.html#Advanced
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS


def expand(body: Buffer, max_body_bytes: int) -> bytes:
    """A body as it was before it was compressed.

    Args:
        body: gzip (RFC 1952) or deflate (RFC 1950).
        max_body_bytes: the longest that it may become; no more is made.

    Raises:
        BodyTooLargeError: if it becomes longer.
        MalformedRequestError: if it is neither, incomplete, or followed by something else.
    """
    stream = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        plain = stream.decompress(body, max_body_bytes + 1)
    except zlib.error as error:
        raise MalformedRequestError("", f"the body is neither gzip nor deflate: {error}") from error
    if len(plain) > max_body_bytes:
        unit = "bytes in the body once it is decompressed"
        raise BodyTooLargeError("", "max_body_bytes", max_body_bytes, f"at least {len(plain)}", unit)
    if not stream.eof:
        raise MalformedRequestError("", "the compressed body ends before it is complete")
    if stream.unused_data:
        raise MalformedRequestError("", f"{len(stream.unused_data)} bytes follow the compressed body")
    return plain
