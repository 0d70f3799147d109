"""Roles on the wire: what the URIs in a peer's certificate (its subjectAltName) let it do.

The URI is `shardrank:router`, `shardrank:node` or `shardrank:operator`, or another one that stands for such a role, as
a SPIFFE id does. What a certificate shows stands in no message and no log line.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import StringConstraints

from shard_node.errors import CertificateRoleError
from shard_node.wire.frame import FrameType

logger = logging.getLogger(__name__)

Role: TypeAlias = Literal["router", "node", "operator"]
RoleUris: TypeAlias = tuple[
    tuple[Role, Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9+.\-]*:\S+$")]], ...
]
"""URIs that stand for a role beside `shardrank:<role>`."""

ROLES: Final[tuple[Role, ...]] = ("router", "node", "operator")
SCHEME: Final = "shardrank:"
# A router may send whatever there is. No node connects to another, so a node's role opens nothing.
CLIENTS: Final[frozenset[Role]] = frozenset({"router", "operator"})
NODES: Final[frozenset[Role]] = frozenset({"node"})
OPERATOR_FRAMES: Final = frozenset({FrameType.INFO, FrameType.COUNTS})
_MAX_WARNINGS: Final = 256


class CertificateRoles:
    """Reads the roles of peers, and warns once for each address of certificates that have none."""

    def __init__(self, uris: RoleUris = ()) -> None:
        self._role_uris = {*((role, f"{SCHEME}{role}") for role in ROLES), *uris}
        self._warned: set[str] = set()

    def check(self, certificate: Mapping[str, Any], address: str, allowed: frozenset[Role]) -> frozenset[Role]:
        """Return which of the allowed roles a verified certificate, as of `ssl.SSLSocket.getpeercert`, gives its owner.

        One without any role has all of them, for this release. Raises CertificateRoleError for one with others only.
        """
        uris = {name for kind, name in certificate.get("subjectAltName", ()) if kind == "URI"}
        roles = {role for role, uri in self._role_uris if uri in uris}
        wanted = " or ".join(f"{SCHEME}{role}" for role in sorted(allowed))
        if roles & allowed:
            return allowed & roles
        if roles or any(uri.lower().startswith(SCHEME) for uri in uris):
            shown = f"of a {' and '.join(sorted(roles))}" if roles else "not known on the wire"
            raise CertificateRoleError(f"the role in the certificate's URI is {shown}; allowed here is {wanted}")
        if address not in self._warned and len(self._warned) < _MAX_WARNINGS:
            self._warned.add(address)
            says = "the certificate of %s has no role: the next release lets in only one with a URI (subjectAltName) %s"
            logger.warning(says, address, wanted)
        return allowed


def check_frame(roles: frozenset[Role], frame_type: int) -> None:
    """Raise CertificateRoleError for a frame that a client with these roles may not send."""
    if "router" not in roles and frame_type not in OPERATOR_FRAMES:
        raise CertificateRoleError(f"frame type {frame_type} is for {SCHEME}router; allowed here are INFO and COUNTS")
