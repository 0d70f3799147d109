"""The limits of a serving process. Every one has a default, and an error that meets one names it."""

from __future__ import annotations

import ipaddress
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from loader.manifest import Frozen

MAX_ID = 2**63 - 1


class RequestLimits(Frozen):
    """What one request, one connection and one process may take.

    With the defaults no single message takes more than 50 ms to read or refuse, JSON of its full limit 100 ms
    (`python -m loadtest.worst_message` measures it); while it is read, others wait.

    Attributes:
        max_body_bytes: bytes of one request body (HTTP) or message (gRPC).
        max_json_bytes: bytes of JSON in one request. It takes longer to read than binary forms, and most to refuse.
        max_message_fields: fields of one protobuf message, unknown ones too. A packed or raw array is one field; each
            string id, and each number that is not packed, is one too.
        max_string_ids: ids of one request that are strings.
        max_candidates: candidates of one request.
        max_ids_per_bag: ids of one feature for one candidate, or of one context feature.
        max_ids_per_request: ids of one request over all features.
        max_bags_per_feature: bags of one feature in a lookup.
        max_lookup_floats: floats that the answer to a lookup may hold; each row and each bag of rows counts
            as one more.
        max_request_id_chars: characters of a request's own `request_id`.
        max_routing_key_chars: characters of a request's `routing_key`.
        default_timeout_ms: deadline of a request that brings none.
        max_timeout_ms: the longest deadline that a request may ask for.
        max_receiving: requests of this process that have begun and are not complete; more are shed.
        max_in_flight: requests of this process between their last byte and their answer; more are shed.
        max_queue: requests of one model version that wait for a ranking replica; more are shed.
        max_batch_requests: requests that a replica joins into one batch.
        max_batch_candidates, max_batch_ids: at which a batch takes no further request; one may have more by itself.
        max_batch_pairs: candidates x longest sequence of a batch, to which the others' are padded, likewise.
        receive_timeout_s: time from a request's first byte until it must be complete, and for a peer to take
            bytes or to answer a ping.
        keep_alive_s: time for which an idle connection is kept, HTTP or gRPC.
        max_connections: open connections of this process, HTTP and gRPC each.
        max_connections_per_address: open connections of one address, HTTP and gRPC together; 0 for any number.
        max_idle_work_ms: processor time that an address may cause without completing a request; above that its
            connections are ended. 0 for any.
        penalty_s: how long such an address may open no connection; 0 for no time at all.
        trusted_proxies: addresses or networks (`10.0.0.0/8`) that stand for many clients: neither their number of
            connections nor penalties are for them.
        max_header_bytes: request line and headers of one HTTP request; also what stands between and behind its chunks.
        max_concurrent_streams: calls at once on one gRPC connection.
        max_connection_age_s: age at which a gRPC connection is asked to end; calls on it are finished.
    """

    max_body_bytes: int = Field(default=16 * 2**20, ge=1, le=2**30)
    max_json_bytes: int = Field(default=2 * 2**20, ge=1, le=2**30)
    max_message_fields: int = Field(default=2**14, ge=64, le=2**27)
    max_string_ids: int = Field(default=2**14, ge=1, le=2**27)
    max_candidates: int = Field(default=4096, ge=1, le=2**20)
    max_ids_per_bag: int = Field(default=4096, ge=1, le=2**24)
    max_ids_per_request: int = Field(default=2**20, ge=1, le=2**27)
    max_bags_per_feature: int = Field(default=65_536, ge=1, le=2**24)
    max_lookup_floats: int = Field(default=2**18, ge=1, le=2**28)
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
    max_connections_per_address: int = Field(default=1024, ge=0)
    max_idle_work_ms: int = Field(default=200, ge=0, le=60_000)
    penalty_s: float = Field(default=10.0, ge=0, le=3600)
    trusted_proxies: tuple[str, ...] = Field(default=(), max_length=256, exclude=True)
    max_header_bytes: int = Field(default=32 * 2**10, ge=1024, le=2**20)
    max_concurrent_streams: int = Field(default=256, ge=1)
    max_connection_age_s: float = Field(default=3600.0, gt=0, le=86_400)

    @field_validator("trusted_proxies", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(value.split(",")) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.default_timeout_ms > self.max_timeout_ms:
            raise ValueError(
                f"default_timeout_ms {self.default_timeout_ms} is more than max_timeout_ms {self.max_timeout_ms}"
            )
        for proxy in self.trusted_proxies:
            ipaddress.ip_network(proxy, strict=False)
        return self
