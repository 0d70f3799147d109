"""The shard node's branch of the error tree."""

from __future__ import annotations

from loader.errors import ShardrankError


class ShardNodeError(ShardrankError):
    """Something a shard node or its client refused or failed at."""


class AddressError(ShardNodeError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="address"):
    """An address that can't be read, or that this process can't listen on."""


class InvalidBagsError(ShardNodeError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="invalid_bags"):
    """Flat arrays that do not describe bags, or a row number outside its table."""


class TlsConfigError(ShardNodeError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="tls_config"):
    """A certificate, key or CA that can't be read or does not fit. The message names the file."""


class TracingError(ShardNodeError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="tracing"):
    """Traces can't be sent: OpenTelemetry is not installed, or the endpoint or protocol can't be one."""


class WireError(ShardNodeError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="wire"):
    """A frame that breaks the protocol: bad magic, version, type, array header or length."""


class FrameTooLargeError(WireError, http_status=413, grpc_status="RESOURCE_EXHAUSTED", kind="frame_too_large"):
    """A frame longer than the configured limit, refused from its header before its body is read."""


class GenerationNotFoundError(ShardNodeError, http_status=404, grpc_status="NOT_FOUND", kind="generation_not_found"):
    """The model or version is not servable here."""


class GenerationStateError(ShardNodeError, http_status=409, grpc_status="FAILED_PRECONDITION", kind="generation_state"):
    """A stage, flip or retire that the generation's state does not allow."""


class NodeUnavailableError(ShardNodeError, http_status=503, grpc_status="UNAVAILABLE", kind="node_unavailable"):
    """No connection to the node, or it was lost before the answer came."""


class TlsHandshakeError(NodeUnavailableError, kind="tls_handshake"):
    """Two sides could not agree on a TLS connection; `shard_node.wire.tls` has the kinds that say why."""


class CertificateRoleError(
    TlsHandshakeError, http_status=403, grpc_status="PERMISSION_DENIED", kind="tls_certificate_role"
):
    """A certificate whose role on the wire does not reach as far as the connection or the frame."""


class NodeOverloadedError(ShardNodeError, http_status=503, grpc_status="RESOURCE_EXHAUSTED", kind="node_overloaded"):
    """The node's queue is full; the request was not started."""


class BufferFullError(ShardNodeError, http_status=429, grpc_status="RESOURCE_EXHAUSTED", kind="buffer_full"):
    """The process holds as many bytes of messages as it may; this one was not read to its end."""


class StagingBusyError(ShardNodeError, http_status=503, grpc_status="UNAVAILABLE", kind="staging_busy"):
    """As many of the fleet's processes stage a version as may at a time."""


class DeadlineExceededError(ShardNodeError, http_status=504, grpc_status="DEADLINE_EXCEEDED", kind="deadline_exceeded"):
    """The deadline passed before the answer was complete."""


class FleetMismatchError(ShardNodeError, http_status=409, grpc_status="FAILED_PRECONDITION", kind="fleet_mismatch"):
    """A node whose number of shards, sharding or replicated bytes are not those of its fleet."""


class MemoryBudgetError(ShardNodeError, http_status=507, grpc_status="RESOURCE_EXHAUSTED", kind="memory_budget"):
    """The rows do not fit the memory they were given. The message carries the numbers."""


class DeviceChoiceError(ShardNodeError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="device_choice"):
    """Devices that can't be read, that are not there, or do not fit the number of cards."""


class CardsUnavailableError(ShardNodeError, http_status=503, grpc_status="UNAVAILABLE", kind="cards_unavailable"):
    """This process can't use its GPUs as it must. The message names what is missing and how to get it."""


class CardError(ShardNodeError, kind="card"):
    """CUDA refused or failed at something. The message names the call, the device and CUDA's own error."""


class RemoteError(ShardNodeError, kind="remote"):
    """The node failed while answering; its own message is carried."""
