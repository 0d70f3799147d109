"""TLS for everything that listens or connects: contexts that follow their files, failed handshakes, and roles.

New files make a new context, since a live one keeps certificates of other key types and CAs: a server's handshakes are
switched to it by the callback for SNI, a client asks for it before it connects. What a peer may do on the wire is said
by URIs in its certificate (its subjectAltName); what a certificate shows stands in no message and no log line.
"""

from __future__ import annotations

import logging
import os
import ssl
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Generic, Literal, Self, TypeAlias, TypeVar

from pydantic import StringConstraints, model_validator

from loader.errors import ShardrankError
from loader.snapshot.tables import Frozen
from shard_node.errors import CertificateRoleError, TlsConfigError, TlsHandshakeError

logger = logging.getLogger(__name__)

T = TypeVar("T")

CHECK_INTERVAL_S: Final = 1.0


class FileBacked(Generic[T]):
    """A value that `read` makes of files, read again by `get` if they changed. Any thread may call it.

    Files are checked when the value is requested, at most every `interval_s`. While they can't be read (`read` raises
    ShardrankError), the last value stays, and one warning is logged for each state that they are in.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        read: Callable[[], T],
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = CHECK_INTERVAL_S,
    ) -> None:
        self._paths = tuple(paths)
        self._read = read
        self._clock = clock
        self._interval_s = interval_s
        self._looked_at = clock()
        # Taken before the files are read: what changes while they are is seen at the next look.
        self._stamp = tuple(map(_stamp, self._paths))
        self._value = read()

    def get(self) -> T:
        """Return the value, read again if the files have changed."""
        now = self._clock()
        if now - self._looked_at < self._interval_s:
            return self._value
        self._looked_at = now
        stamp = tuple(map(_stamp, self._paths))
        if stamp == self._stamp:
            return self._value
        self._stamp = stamp
        try:
            self._value = self._read()
        except ShardrankError as error:
            logger.warning("%s; what was read before stays in use", error)
        else:
            logger.info("read again: %s", ", ".join(map(str, self._paths)))
        return self._value


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


HANDSHAKE_TIMEOUT_S: Final = 5.0
SHUTDOWN_TIMEOUT_S: Final = 1.0

PLAIN_TEXT: Final = "tls_plain_text"
UNTRUSTED: Final = "tls_untrusted_certificate"
EXPIRED: Final = "tls_expired_certificate"
MISSING: Final = "tls_missing_certificate"
# What OpenSSL's reasons mean; alerts are those of the other side.
_KINDS: Final = {
    **dict.fromkeys(("HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL"), PLAIN_TEXT),
    **dict.fromkeys(("PEER_DID_NOT_RETURN_A_CERTIFICATE", "TLSV13_ALERT_CERTIFICATE_REQUIRED"), MISSING),
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": EXPIRED,
    "TLSV1_ALERT_UNKNOWN_CA": UNTRUSTED,
    **dict.fromkeys(("SSLV3_ALERT_BAD_CERTIFICATE", "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE"), UNTRUSTED),
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": UNTRUSTED,
}

Role: TypeAlias = Literal["router", "node", "operator", "trainer"]
RoleUris: TypeAlias = tuple[
    tuple[Role, Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9+.\-]*:\S+$")]], ...
]
"""URIs that stand for a role in addition to `shardrank:<role>`."""
SCHEME: Final = "shardrank:"
# A router may send whatever changes nothing. No node connects to another, so a node's role opens nothing.
CLIENTS: Final[frozenset[Role]] = frozenset({"router", "operator", "trainer"})
NODES: Final[frozenset[Role]] = frozenset({"node"})


@dataclass(slots=True)
class Handshake:
    """A server's handshake: the address it is with, "" if not known, and why it failed, None if it did not."""

    address: str = ""
    refused: TlsHandshakeError | None = None


handshake: ContextVar[Handshake | None] = ContextVar("handshake", default=None)
"""The one that starts, set by who accepts connections: event loops do not tell a context whose connection it is."""


class TlsConfig(Frozen):
    """A server's certificate chain and its key, and the CAs of one of which clients have to show a certificate; PEM."""

    cert: Path
    key: Path
    client_ca: Path | None = None
    role_uris: RoleUris = ()


class TlsClientConfig(Frozen):
    """The CAs of servers, whose certificates must be for the host, and what is shown to servers that ask; all PEM."""

    ca: Path
    cert: Path | None = None
    key: Path | None = None
    role_uris: RoleUris = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key belong together: both, or none")
        return self


class TlsPeers:
    """The peers of a process: how many were refused, by kind, and the roles in their certificates."""

    def __init__(self, role_uris: RoleUris = (), clock: Callable[[], float] = time.monotonic) -> None:
        self.refusals: Counter[str] = Counter()
        self._role_uris = {*((role, f"{SCHEME}{role}") for role in CLIENTS | NODES), *role_uris}
        self._clock = clock
        self._logged_at: dict[str, float] = {}
        self._warned: set[str] = set()

    def refuse(self, address: str, error: TlsHandshakeError) -> None:
        """Count a peer that was refused; one a minute of each kind is logged. `address` is "" if it is not known."""
        self.refusals[error.kind] += 1
        now = self._clock()
        if now - self._logged_at.get(error.kind, -60.0) >= 60.0:
            self._logged_at[error.kind] = now
            source, count = f" from {address}" if address else "", self.refusals[error.kind]
            logger.warning("refused a connection%s: %s: %s (%d so far)", source, error.kind, error, count)

    def roles(self, certificate: Mapping[str, Any], address: str, allowed: frozenset[Role]) -> frozenset[Role]:
        """Return which of the allowed roles a verified certificate, as of `ssl.SSLSocket.getpeercert`, gives its owner.

        One without any has all but `trainer`, for this release, with a warning. Raises CertificateRoleError: others
        only.
        """
        uris = {name for kind, name in certificate.get("subjectAltName", ()) if kind == "URI"}
        roles = {role for role, uri in self._role_uris if uri in uris}
        expected = " or ".join(f"{SCHEME}{role}" for role in sorted(allowed))
        if roles & allowed:
            return allowed & roles
        if roles or any(uri.lower().startswith(SCHEME) for uri in uris):
            shown = f"of a {' and '.join(sorted(roles))}" if roles else "not known on the wire"
            raise CertificateRoleError(f"the role in the certificate's URI is {shown}; allowed here is {expected}")
        if address not in self._warned and len(self._warned) < 256:
            self._warned.add(address)
            says = "the certificate of %s has no role: the next release lets in only one with a URI (subjectAltName) %s"
            logger.warning(says, address, expected)
        return allowed - {"trainer"}


class TlsContext(ssl.SSLContext):
    """A context, and what is known of its peers."""

    peers: TlsPeers


class _ServerHandshake(ssl.SSLObject):
    """Counts a handshake that fails, and lets its alert out.

    Event loops drop the alert that is ready when a handshake fails, and clients see a broken connection. So the loop is
    first told that the handshake waits for more, whereupon it sends what is ready; the client closes, or time ends it.
    """

    _handshake: Handshake
    _failure: ssl.SSLError | None = None

    def __new__(cls) -> Self:
        made = super().__new__(cls)
        made._handshake = handshake.get() or Handshake()
        return made

    def do_handshake(self) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, ssl.SSLSyscallError, ssl.SSLEOFError):
            raise
        except ssl.SSLError as error:
            refused = self._handshake.refused = tls_error(error)
            assert isinstance(self.context, TlsContext)
            self.context.peers.refuse(self._handshake.address, refused)
            # A peer that speaks another protocol does not read alerts.
            if refused.kind == PLAIN_TEXT:
                raise
            # Without the traceback, whose frames hold this object.
            self._failure = error.with_traceback(None)
            raise ssl.SSLWantReadError from None


def server_context(
    config: TlsConfig,
    alpn: Sequence[str] = (),
    interval_s: float = CHECK_INTERVAL_S,
    verify: ssl.VerifyMode = ssl.CERT_REQUIRED,
) -> TlsContext:
    """Return a server's context, TLS 1.2 and later, which offers `alpn` and follows its files.

    With CERT_OPTIONAL in `verify` a client without a certificate is let in too. The files are checked at most every
    `interval_s`. Raises TlsConfigError, naming a file that can't be read or used.
    """
    peers, files = TlsPeers(config.role_uris), (config.client_ca, config.cert, config.key)

    def make() -> TlsContext:
        context = _load(ssl.PROTOCOL_TLS_SERVER, peers, *files)
        context.sslobject_class = _ServerHandshake
        if config.client_ca is not None:
            context.verify_mode = verify
            # A ticket would let a client in again without its certificate being checked.
            context.num_tickets = 0
            context.options |= ssl.OP_NO_TICKET
        if alpn:
            context.set_alpn_protocols(list(alpn))
        return context

    def switch(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = current.get()

    current = FileBacked(list(filter(None, files)), make, interval_s=interval_s)
    first = current.get()
    first.sni_callback = switch
    return first


def client_context(config: TlsClientConfig, interval_s: float = CHECK_INTERVAL_S) -> FileBacked[TlsContext]:
    """Return what gives a client's context for each connection, as `server_context`; host names are verified too."""
    peers, files = TlsPeers(config.role_uris), (config.ca, config.cert, config.key)
    make = partial(_load, ssl.PROTOCOL_TLS_CLIENT, peers, *files)
    return FileBacked(list(filter(None, files)), make, interval_s=interval_s)


def _load(protocol: int, peers: TlsPeers, ca: Path | None, cert: Path | None, key: Path | None) -> TlsContext:
    context = TlsContext(protocol)
    context.peers, context.minimum_version = peers, ssl.TLSVersion.TLSv1_2
    files, content = f"{cert}, {key}", "a certificate and its private key"
    try:
        if cert is not None:
            # With a password, so that OpenSSL asks no person for one.
            context.load_cert_chain(cert, key, password="")
        if ca is not None:
            files, content = f"{ca}", "certificates of CAs"
            context.load_verify_locations(ca)
    except ssl.SSLError as error:
        raise TlsConfigError(f"{files}: must be {content}, in PEM, not encrypted ({error.reason or error})") from None
    except OSError as error:
        raise TlsConfigError(f"{files}: {error.strerror or error}") from None
    if ca is not None and not context.cert_store_stats()["x509_ca"]:
        raise TlsConfigError(f"{ca}: none of its certificates is of a CA")
    return context


def tls_error(error: ssl.SSLError) -> TlsHandshakeError:
    """Return what a failed handshake, or the alert that ended a connection, means."""
    if isinstance(error, ssl.SSLCertVerificationError):
        # X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED.
        kind = EXPIRED if error.verify_code in (9, 10) else UNTRUSTED
        return TlsHandshakeError(f"the other side's certificate is refused: {error.verify_message}", kind=kind)
    return TlsHandshakeError(f"the handshake failed: {error.reason or error}", kind=_KINDS.get(error.reason))
