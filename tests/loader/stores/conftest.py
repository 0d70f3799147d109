from __future__ import annotations

from shardrank_testing.s3_server import bucket, s3_port

__all__ = ["bucket", "s3_port"]
