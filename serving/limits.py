"""The limits of a serving process. Every one has a default, and an error that meets one names it."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from loader.snapshot.tables import Frozen
from shard_node.byte_budget import check_buffer_bytes, default_buffer_bytes

MAX_ID = 2**63 - 1


class RequestLimits(Frozen):
    """What one request, one connection and one process may use; docs/api.md has a table.

    With the defaults no single message should take more than 50 ms to read or refuse, JSON of its full limit 100 ms:
    the slowest of 173 that were made to be slow took 29 ms and 59 ms (2026-11-22). While one is read, others wait.
    """

    max_body_bytes: int = Field(default=16 * 2**20, ge=1, le=2**30)
    max_buffered_bytes: int = Field(
        default_factory=lambda limits: default_buffer_bytes(limits["max_body_bytes"]), ge=1, le=2**40
    )
    max_json_bytes: int = Field(default=2 * 2**20, ge=1, le=2**30)
    max_message_fields: int = Field(default=2**14, ge=64, le=2**27)
    max_string_ids: int = Field(default=2**14, ge=1, le=2**27)
    max_candidates: int = Field(default=4096, ge=1, le=2**20)
    max_ids_per_bag: int = Field(default=4096, ge=1, le=2**24)
    max_ids_per_request: int = Field(default=2**20, ge=1, le=2**27)
    max_bags_per_feature: int = Field(default=65_536, ge=1, le=2**24)
    max_lookup_floats: int = Field(default=2**18, ge=1, le=2**28)
    max_untaken_floats: int = Field(default=2**22, ge=1, le=2**32)
    max_request_id_chars: int = Field(default=128, ge=1, le=1024)
    max_routing_key_chars: int = Field(default=128, ge=1, le=1024)
    default_timeout_ms: int = Field(default=1000, ge=1)
    max_timeout_ms: int = Field(default=60_000, ge=1, le=3_600_000)
    max_receiving: int = Field(default=4096, ge=1)
    max_in_flight: int = Field(default=1024, ge=1)
    max_queue: int = Field(default=256, ge=1)
    max_batch_requests: int = Field(default=64, ge=1, le=4096)
    max_batch_candidates: int = Field(default=2048, ge=1, le=2**20)
    max_batch_ids: int = Field(default=2**18, ge=1, le=2**27)
    max_batch_pairs: int = Field(default=2**18, ge=1, le=2**32)
    receive_timeout_s: float = Field(default=4.0, gt=0, le=3600)
    keep_alive_s: float = Field(default=60.0, gt=0, le=3600)
    max_connections: int = Field(default=4096, ge=1)
    max_idle_work_ms: int = Field(default=200, ge=0, le=60_000)
    max_header_bytes: int = Field(default=32 * 2**10, ge=1024, le=2**20)
    max_concurrent_streams: int = Field(default=256, ge=1)
    max_connection_age_s: float = Field(default=3600.0, gt=0, le=86_400)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.default_timeout_ms > self.max_timeout_ms:
            raise ValueError(
                f"default_timeout_ms {self.default_timeout_ms} is more than max_timeout_ms {self.max_timeout_ms}"
            )
        check_buffer_bytes(self.max_buffered_bytes, "max_body_bytes", self.max_body_bytes)
        return self
