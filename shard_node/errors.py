"""The shard node's errors. Those that all packages raise are in `loader.errors`."""

from __future__ import annotations

from typing import ClassVar

from loader.errors import ShardrankError, UnavailableError


class InvalidBagsError(ShardrankError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="invalid_bags"):
    """Flat arrays that do not describe bags, or a row number outside its table."""


class TlsConfigError(ShardrankError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="tls_config"):
    """A certificate, key or CA that can't be read or does not fit. The message names the file."""


class WireError(ShardrankError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="wire"):
    """A frame that breaks the protocol: bad magic, version, type, array header or length.

    `frame_too_large`: longer than the configured limit, refused from its header before its body is read.
    """

    kinds: ClassVar = {"frame_too_large": (413, "RESOURCE_EXHAUSTED")}


class GenerationNotFoundError(ShardrankError, http_status=404, grpc_status="NOT_FOUND", kind="generation_not_found"):
    """The model or version is not servable here."""


class NodeUnavailableError(UnavailableError, kind="node_unavailable"):
    """No connection to the node, or it was lost before the answer came."""


class TlsHandshakeError(NodeUnavailableError, kind="tls_handshake"):
    """Two sides could not agree on a TLS connection; `shard_node.wire.tls` has the kinds that say why."""


class CertificateRoleError(
    TlsHandshakeError, http_status=403, grpc_status="PERMISSION_DENIED", kind="tls_certificate_role"
):
    """A certificate whose role on the wire does not reach as far as the connection or the frame."""


class PushRefusedError(ShardrankError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="push_refused"):
    """Gradients that do not fit what is trained. The message names what was expected.

    `push_step`: a step that is not the worker's next one. `not_training`: the node trains nothing.
    """

    kinds: ClassVar = {"push_step": (409, "FAILED_PRECONDITION"), "not_training": (403, "PERMISSION_DENIED")}


class TrainingLogError(ShardrankError, http_status=409, grpc_status="FAILED_PRECONDITION", kind="training_log"):
    """A folder of logs and checkpoints that is another training's, another process', or damaged."""


class TrainingFailedError(UnavailableError, kind="training_failed"):
    """The node takes no more gradients: it ends, or could not write its log. The message has the cause."""


class RemoteError(ShardrankError, kind="remote"):
    """The node failed while answering; its own message is carried."""


class MemoryBudgetError(ShardrankError, http_status=507, grpc_status="RESOURCE_EXHAUSTED", kind="memory_budget"):
    """The rows do not fit the memory they were given. The message carries the numbers."""


class RowReadError(UnavailableError, kind="rows_unreadable"):
    """Rows on disk can't be read. The message names the file; another replica may have them."""


class DeviceChoiceError(ShardrankError, http_status=400, grpc_status="INVALID_ARGUMENT", kind="device_choice"):
    """Devices that can't be read, that are not there, or do not fit the number of cards."""


class CardsUnavailableError(ShardrankError, http_status=503, grpc_status="UNAVAILABLE", kind="cards_unavailable"):
    """This process can't use its GPUs as it must. The message names what is missing and how to get it.

    `peer_access`: cards that can't read each other's memory, where that is required.
    """

    kinds: ClassVar = {"peer_access": (409, "FAILED_PRECONDITION")}


class CardError(ShardrankError, kind="card"):
    """CUDA refused or failed at something. The message names the call, the device and CUDA's own error."""
