"""What one connection may take."""

from __future__ import annotations

from dataclasses import dataclass

from serving.http2.frames import INITIAL_WINDOW_SIZE, MAX_CONCURRENT_STREAMS, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE

BLOCKS_OVER_LIMIT = 4


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Of every connection of a listener.

    Attributes:
        max_streams: at once on one connection.
        max_header_bytes: of the list of headers of one request, as RFC 9113 counts it (section 10.5.1). Whoever reads
            it refuses a longer one.
        stream_window, connection_window: bytes that a peer may send unasked.
        frame_size: longest payload that it is asked to send.
        patience_s: for the peer's first frames, and for any frame after a ping, which it is sent at this interval.
            A stream whose data it does not let go on for twice as long is dropped.
        idle_s: time without a stream after which it is asked to go.
        age_s: time after which it is asked to go.
        grace_s: how long the streams of a connection that was asked to go may take.
        max_control_frames: of a peer in `patience_s`: frames that cost work and carry no request.
    """

    max_streams: int
    max_header_bytes: int
    patience_s: float
    idle_s: float
    age_s: float
    grace_s: float
    stream_window: int = 2**20
    connection_window: int = 2**24
    frame_size: int = 2**20
    max_control_frames: int = 20_000

    @property
    def max_block_bytes(self) -> int:
        """Of a header block that is still read, for its request alone to be refused; a longer one ends the connection.

        Others may share the connection, through a proxy that does not know the limit or does not keep to it.
        """
        return BLOCKS_OVER_LIMIT * self.max_header_bytes

    @property
    def settings(self) -> dict[int, int]:
        """What the peer is told of them."""
        return {
            MAX_CONCURRENT_STREAMS: self.max_streams,
            INITIAL_WINDOW_SIZE: self.stream_window,
            MAX_FRAME_SIZE: self.frame_size,
            MAX_HEADER_LIST_SIZE: self.max_header_bytes,
        }
