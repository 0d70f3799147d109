"""TLS for everything that listens or connects: contexts that follow their files, and what a failed handshake means.

A live `ssl.SSLContext` can load another certificate but never forgets a CA, and it goes on to take session tickets
that it gave out before. So `ReloadingContext` makes every new handshake by a context of the files as they are now.
Connections that are open keep the context that made them. (The callback for SNI can switch contexts too, but tickets
stay those of the first one; listening again on the same socket drops who waits there.)
"""

from __future__ import annotations

import logging
import ssl
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from pydantic import model_validator

from loader.file_backed import LOOK_INTERVAL_S, FileBacked
from loader.snapshot.tables import Frozen
from shard_node.errors import (
    ExpiredCertificateError,
    MissingCertificateError,
    NodeUnavailableError,
    PlainTextError,
    TlsConfigError,
    TlsHandshakeError,
    UntrustedCertificateError,
)
from shard_node.wire.roles import CertificateRoles, RoleUris

if TYPE_CHECKING:
    from socket import socket

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S: Final = 5.0
SHUTDOWN_TIMEOUT_S: Final = 1.0
MAX_PEM_BYTES: Final = 1 << 20
LOG_AGAIN_S: Final = 600.0
MAX_LINES_PER_MINUTE: Final = 10
_MAX_SOURCES: Final = 1024

# X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED.
_OUTSIDE_ITS_TIME = frozenset({9, 10})
_PLAIN_TEXT = frozenset({"HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL"})
_UNTRUSTED_ALERTS = frozenset(
    {
        "TLSV1_ALERT_UNKNOWN_CA",
        "SSLV3_ALERT_BAD_CERTIFICATE",
        "SSLV3_ALERT_CERTIFICATE_UNKNOWN",
        "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE",
    }
)


class Handshake:
    """A server's handshake, between who accepts the connection and the context that makes it.

    `address` is whose it is, for logs, "" if that is not known; `refused` says why the other side was refused, or None.
    """

    __slots__ = ("address", "refused")

    def __init__(self, address: str) -> None:
        self.address = address
        self.refused: TlsHandshakeError | None = None


handshake: ContextVar[Handshake | None] = ContextVar("handshake", default=None)
"""That which begins. Set by who accepts connections himself; `loop.create_server` tells nobody whose it is."""


class TlsConfig(Frozen):
    """What a server shows, and whom it lets in.

    Attributes:
        cert: its certificate and those between it and its CA, PEM.
        key: the certificate's private key, PEM, not encrypted.
        client_ca: CAs of which every client has to show a certificate, PEM; None to ask for none.
        role_uris: in certificates of clients on the wire.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None
    role_uris: RoleUris = ()


class TlsClientConfig(Frozen):
    """Whom a client believes, and what it shows.

    Attributes:
        ca: CAs of servers, PEM. A server's certificate must be for the host that was connected to.
        cert, key: shown to servers that ask for a certificate, PEM; both or none.
        role_uris: in certificates of nodes.
    """

    ca: Path
    cert: Path | None = None
    key: Path | None = None
    role_uris: RoleUris = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key belong together: both, or none")
        return self


class Refusals:
    """Failed handshakes: all are counted by kind, few are logged.

    An address gets one line in ten minutes for each kind, and all addresses together ten a minute.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[str] = Counter()
        self._clock = clock
        self._logged_at: dict[tuple[str, str], float] = {}
        self._minute = 0.0
        self._lines = 0

    def add(self, address: str, error: TlsHandshakeError) -> None:
        """Count one; `address` is empty if it is not known."""
        self.counts[error.kind] += 1
        now, source = self._clock(), (address, error.kind)
        if now - self._logged_at.get(source, -LOG_AGAIN_S) < LOG_AGAIN_S:
            return
        if now - self._minute >= 60.0:
            self._minute, self._lines = now, 0
        self._lines += 1
        if self._lines > MAX_LINES_PER_MINUTE:
            return
        if len(self._logged_at) >= _MAX_SOURCES:
            self._logged_at.clear()
        self._logged_at[source] = now
        told = f" from {address}" if address else ""
        logger.warning("refused a connection%s: %s: %s (%d so far)", told, error.kind, error, self.counts[error.kind])


class ReloadingContext(ssl.SSLContext):
    """An `ssl.SSLContext` that makes each handshake by the certificates that lie in their files then.

    Settings of this object itself have no effect: they are those that it was made with. `refusals` has what failed, if
    it is a server's; `roles` reads those in peers' certificates.
    """

    def __init__(
        self, protocol: int, made: FileBacked[ssl.SSLContext], refusals: Refusals, roles: CertificateRoles
    ) -> None:
        del protocol  # taken by __new__
        self._made = made
        self.refusals = refusals
        self.roles = roles

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """As `ssl.SSLContext.wrap_bio`; asyncio and uvloop call it for each connection."""
        wrapped = self._made.get().wrap_bio(incoming, outgoing, server_side, server_hostname, session)
        if isinstance(wrapped, _ServerHandshake):
            wrapped.outgoing, wrapped.refusals = outgoing, self.refusals
            wrapped.handshake = handshake.get() or Handshake("")
        return wrapped

    def wrap_socket(
        self,
        sock: socket,
        server_side: bool = False,
        do_handshake_on_connect: bool = True,
        suppress_ragged_eofs: bool = True,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLSocket:
        """As `ssl.SSLContext.wrap_socket`, for sockets that block."""
        made = self._made.get()
        return made.wrap_socket(
            sock, server_side, do_handshake_on_connect, suppress_ragged_eofs, server_hostname, session
        )


class _ServerHandshake(ssl.SSLObject):
    """Takes note of a handshake that fails, and lets its alert out.

    Event loops close a connection at once when the handshake fails and drop the alert that lies ready then, so that a
    client could never tell that its certificate was refused from a broken connection. Here the loop is first told that
    the handshake waits for more, whereupon it sends what lies ready; the client closes, or the handshake's time ends.
    """

    outgoing: ssl.MemoryBIO
    refusals: Refusals
    handshake: Handshake
    _failure: ssl.SSLError | None = None

    def do_handshake(self) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, ssl.SSLSyscallError, ssl.SSLEOFError):
            raise
        except ssl.SSLError as error:
            failure = tls_error(error)
            self.handshake.refused = failure
            self.refusals.add(self.handshake.address, failure)
            # Whoever speaks another protocol does not read alerts.
            if not self.outgoing.pending or isinstance(failure, PlainTextError):
                raise
            # Without the traceback, whose frames hold this object.
            self._failure = error.with_traceback(None)
        if self._failure is not None:
            raise ssl.SSLWantReadError


def server_context(
    config: TlsConfig,
    alpn: Sequence[str] = (),
    clock: Callable[[], float] = time.monotonic,
    interval_s: float = LOOK_INTERVAL_S,
    verify: ssl.VerifyMode = ssl.CERT_REQUIRED,
) -> ReloadingContext:
    """Return a server's context, TLS 1.2 and later, which offers `alpn` and follows its files.

    With CERT_OPTIONAL in `verify` a client that shows no certificate is let in too, and has to be told apart.
    The files are looked at no more often than every `interval_s`. Raises TlsConfigError, naming a file that can't be
    read or does not fit.
    """

    def make() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.sslobject_class = _ServerHandshake
        _load_chain(context, config.cert, config.key)
        if config.client_ca is not None:
            _load_ca(context, config.client_ca)
            context.verify_mode = verify
            # A ticket would let a client in again without its certificate being looked at.
            context.num_tickets = 0
            context.options |= ssl.OP_NO_TICKET
        if alpn:
            context.set_alpn_protocols(list(alpn))
        return context

    paths = [path for path in (config.cert, config.key, config.client_ca) if path is not None]
    made = FileBacked(paths, make, clock, interval_s)
    return ReloadingContext(ssl.PROTOCOL_TLS_SERVER, made, Refusals(clock), CertificateRoles(config.role_uris))


def client_context(
    config: TlsClientConfig,
    alpn: Sequence[str] = (),
    clock: Callable[[], float] = time.monotonic,
    interval_s: float = LOOK_INTERVAL_S,
) -> ReloadingContext:
    """Return a client's context, as `server_context`: servers are verified, their host names too."""

    def make() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        _load_ca(context, config.ca)
        if config.cert is not None and config.key is not None:
            _load_chain(context, config.cert, config.key)
        if alpn:
            context.set_alpn_protocols(list(alpn))
        return context

    paths = [path for path in (config.ca, config.cert, config.key) if path is not None]
    made = FileBacked(paths, make, clock, interval_s)
    return ReloadingContext(ssl.PROTOCOL_TLS_CLIENT, made, Refusals(clock), CertificateRoles(config.role_uris))


def tls_error(error: ssl.SSLError) -> TlsHandshakeError:
    """Return what a failed handshake, or the alert that ended a connection, means, as the class of its kind."""
    if isinstance(error, ssl.SSLCertVerificationError):
        expired = error.verify_code in _OUTSIDE_ITS_TIME
        kind = ExpiredCertificateError if expired else UntrustedCertificateError
        return kind(f"the other side's certificate is refused: {error.verify_message}")
    reason = error.reason or ""
    if reason in _PLAIN_TEXT:
        return PlainTextError("the other side does not speak TLS here")
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return MissingCertificateError("the other side shows no certificate")
    if reason == "TLSV13_ALERT_CERTIFICATE_REQUIRED":
        return MissingCertificateError("the other side asks for a certificate, and this one shows none")
    if reason == "SSLV3_ALERT_CERTIFICATE_EXPIRED":
        return ExpiredCertificateError("the other side refuses this one's certificate: it has expired")
    if reason in _UNTRUSTED_ALERTS:
        return UntrustedCertificateError(f"the other side refuses this one's certificate: {reason}")
    return TlsHandshakeError(reason or str(error))


def connection_failure(error: BaseException) -> tuple[type[NodeUnavailableError], str]:
    """Tell what ended a connection, or kept it from being made: the error's class for callers, and the reason."""
    if isinstance(error, ssl.SSLError):
        error = tls_error(error)
    if isinstance(error, TlsHandshakeError):
        return type(error), str(error)
    return NodeUnavailableError, str(error) or type(error).__name__


def _load_chain(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    # Alone at first, so that what fails afterwards is the key's fault.
    _load_certificates(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), cert)
    _check_readable(key)

    def no_password() -> str:
        raise TlsConfigError(f"{key}: the key is encrypted; allowed is a PEM file without a password")

    try:
        context.load_cert_chain(cert, key, no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise TlsConfigError(f"{key}: the key does not belong to the certificate in {cert}") from None
        raise TlsConfigError(f"{key}: no usable private key in PEM ({error.reason or error})") from None
    except OSError as error:
        raise TlsConfigError(f"{key} or {cert}: {error.strerror or error}") from None


def _load_ca(context: ssl.SSLContext, path: Path) -> None:
    _load_certificates(context, path)
    if not context.cert_store_stats()["x509_ca"]:
        raise TlsConfigError(f"{path}: none of its certificates is of a CA")


def _load_certificates(context: ssl.SSLContext, path: Path) -> None:
    _check_readable(path)
    try:
        context.load_verify_locations(cafile=path)
    except ssl.SSLError as error:
        raise TlsConfigError(f"{path}: no usable certificate in PEM ({error.reason or error})") from None
    except OSError as error:
        raise TlsConfigError(f"{path}: {error.strerror or error}") from None


def _check_readable(path: Path) -> None:
    try:
        with path.open("rb") as file:
            size = len(file.read(MAX_PEM_BYTES + 1))
    except OSError as error:
        raise TlsConfigError(f"{path}: {error.strerror or error}") from None
    if size > MAX_PEM_BYTES:
        raise TlsConfigError(f"{path}: longer than {MAX_PEM_BYTES} bytes")
