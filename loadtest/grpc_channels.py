"""gRPC channels for a client that is a load."""

from __future__ import annotations

import grpc.aio

CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    # After a serving process was killed, its port is tried again at once, not after gRPC's second and more.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 500),
)


def open_channels(host: str, port: int, count: int) -> list[grpc.aio.Channel]:
    """Open channels with connections of their own, so that they reach different processes behind one port."""
    at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return [
        grpc.aio.insecure_channel(at, options=[*CHANNEL_OPTIONS, ("shardrank.channel", number)])
        for number in range(count)
    ]


def as_it_is(message: bytes) -> bytes:
    """Serialise a message that is serialised already."""
    return message
