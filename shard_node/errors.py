"""The shard node's branch of the error tree."""

from __future__ import annotations

from loader.errors import ShardrankError


class ShardNodeError(ShardrankError):
    """Something a shard node or its client refused or failed at."""


class AddressError(ShardNodeError):
    """An address that can't be read, or that this process can't listen on."""

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    kind = "address"


class InvalidBagsError(ShardNodeError):
    """Flat arrays that do not describe bags, or a row number outside its table."""

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    kind = "invalid_bags"


class TlsConfigError(ShardNodeError):
    """A certificate, key or CA that can't be read or does not fit. The message names the file."""

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    kind = "tls_config"


class WireError(ShardNodeError):
    """A frame that breaks the protocol: bad magic, version, type, array header or length."""

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    kind = "wire"


class FrameTooLargeError(WireError):
    """A frame longer than the configured limit, refused from its header before its body is read."""

    http_status = 413
    grpc_status = "RESOURCE_EXHAUSTED"
    kind = "frame_too_large"


class GenerationNotFoundError(ShardNodeError):
    """The model or version is not servable here."""

    http_status = 404
    grpc_status = "NOT_FOUND"
    kind = "generation_not_found"


class GenerationStateError(ShardNodeError):
    """A stage, flip or retire that the generation's state does not allow."""

    http_status = 409
    grpc_status = "FAILED_PRECONDITION"
    kind = "generation_state"


class NodeUnavailableError(ShardNodeError):
    """No connection to the node, or it was lost before the answer came."""

    http_status = 503
    grpc_status = "UNAVAILABLE"
    kind = "node_unavailable"


class TlsHandshakeError(NodeUnavailableError):
    """Two sides could not agree on a TLS connection. Whoever notices it raises it, or counts it under this kind."""

    kind = "tls_handshake"


class PlainTextError(TlsHandshakeError):
    """The other side does not speak TLS."""

    kind = "tls_plain_text"


class UntrustedCertificateError(TlsHandshakeError):
    """A certificate that none of the trusted CAs has issued, or that is for another host."""

    kind = "tls_untrusted_certificate"


class ExpiredCertificateError(TlsHandshakeError):
    """A certificate that is not valid any more, or not yet."""

    kind = "tls_expired_certificate"


class MissingCertificateError(TlsHandshakeError):
    """A client that shows no certificate to a server that asks for one."""

    kind = "tls_missing_certificate"


class NodeOverloadedError(ShardNodeError):
    """The node's queue is full; the request was not started."""

    http_status = 503
    grpc_status = "RESOURCE_EXHAUSTED"
    kind = "node_overloaded"


class StagingBusyError(ShardNodeError):
    """As many of the fleet's processes stage a version as may at a time."""

    http_status = 503
    grpc_status = "UNAVAILABLE"
    kind = "staging_busy"


class DeadlineExceededError(ShardNodeError):
    """The deadline passed before the answer was complete."""

    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"
    kind = "deadline_exceeded"


class FleetMismatchError(ShardNodeError):
    """A node whose number of shards, sharding or replicated bytes are not those of its fleet."""

    http_status = 409
    grpc_status = "FAILED_PRECONDITION"
    kind = "fleet_mismatch"


class MemoryBudgetError(ShardNodeError):
    """The rows do not fit the memory they were given. The message carries the numbers."""

    http_status = 507
    grpc_status = "RESOURCE_EXHAUSTED"
    kind = "memory_budget"


class PeerAccessError(ShardNodeError):
    """Cards that can't read each other's memory, where that is required."""

    http_status = 409
    grpc_status = "FAILED_PRECONDITION"
    kind = "peer_access"


class DeviceChoiceError(ShardNodeError):
    """Devices that can't be read, that are not there, or that do not fit the number of cards."""

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    kind = "device_choice"


class CardsUnavailableError(ShardNodeError):
    """This process can't use a GPU. The message names what is missing and how to get it."""

    http_status = 503
    grpc_status = "UNAVAILABLE"
    kind = "cards_unavailable"


class CardError(ShardNodeError):
    """CUDA refused or failed at something. The message names the call, the device and CUDA's own error."""

    kind = "card"


class RemoteError(ShardNodeError):
    """The node failed while answering; its own message is carried."""

    kind = "remote"
