"""A peer's limit for the table of our headers (RFC 7541, section 4.2)."""

from __future__ import annotations

import pytest

from serving.api.grpc import wire as frames
from shardrank_testing.http2_peer import http2_peer, run

END = frames.END_STREAM
END_HEADERS = frames.END_HEADERS


def data(stream_id: int, payload: bytes) -> bytes:
    return frames.frame(frames.DATA, END, stream_id, payload)


@pytest.mark.parametrize("path", [b"/echo", b"/hold"])
@pytest.mark.parametrize("size", [0, 100, 4095])
def test_a_peer_that_makes_the_header_table_smaller_is_told_that_this_is_kept_to(size, path):
    async def main() -> None:
        async with http2_peer() as (peer, echo, _):
            # RFC 7541, section 4.2: a decoder refuses the next block unless it begins with the new size.
            peer.decoder.max_allowed_table_size = size
            peer.begin(frames.settings({frames.HEADER_TABLE_SIZE: size}))
            peer.send(peer.headers(1, more=[(b":path", path)]), data(1, b"held"))
            await echo.until(lambda: echo.num_received == 4)
            if path == b"/hold":
                # A block without headers before it, as a status without an answer is.
                echo.streams[0].send(b"", b"", b"\x88")
                assert await peer.answer(1) == (b"", [(":status", "200")])
            else:
                assert await peer.answer(1) == (b"held", [(":status", "200")])
            assert peer.decoder.header_table_size <= size
            # Said once, it holds, even where the peer takes it back and then gives less again.
            peer.send(frames.settings({frames.HEADER_TABLE_SIZE: 65536}))
            peer.send(frames.settings({frames.HEADER_TABLE_SIZE: 0}))
            peer.send(peer.headers(3), data(3, b""))
            first = await peer.find(frames.HEADERS, 3)
            assert first.payload == b"\x88"

    run(main())
