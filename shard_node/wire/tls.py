"""TLS for everything that listens or connects: contexts that follow their files, and what a failed handshake means.

A live `ssl.SSLContext` keeps certificates of other key types and CAs that it has loaded once, so new files make a new
one: a server's handshakes are switched to it by the callback for SNI, a client asks for it before it connects. Open
connections keep the context that made them.
"""

from __future__ import annotations

import logging
import os
import ssl
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, Self, TypeVar

from pydantic import model_validator

from loader.errors import ShardrankError
from loader.snapshot.tables import Frozen
from shard_node.errors import NodeUnavailableError, TlsConfigError, TlsHandshakeError
from shard_node.wire.roles import CertificateRoles, RoleUris

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_INTERVAL_S: Final = 1.0


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
        interval_s: float = LOOK_INTERVAL_S,
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
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S: Final = 5.0
SHUTDOWN_TIMEOUT_S: Final = 1.0
LOG_INTERVAL_S: Final = 60.0

PLAIN_TEXT: Final = "tls_plain_text"
UNTRUSTED: Final = "tls_untrusted_certificate"
EXPIRED: Final = "tls_expired_certificate"
MISSING: Final = "tls_missing_certificate"
# X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED.
_OUTSIDE_ITS_TIME = frozenset({9, 10})
# What OpenSSL's reasons mean; all but the first five are alerts of the other side.
_KINDS = {
    "HTTP_REQUEST": PLAIN_TEXT,
    "HTTPS_PROXY_REQUEST": PLAIN_TEXT,
    "WRONG_VERSION_NUMBER": PLAIN_TEXT,
    "UNKNOWN_PROTOCOL": PLAIN_TEXT,
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": MISSING,
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": MISSING,
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": EXPIRED,
    "TLSV1_ALERT_UNKNOWN_CA": UNTRUSTED,
    "SSLV3_ALERT_BAD_CERTIFICATE": UNTRUSTED,
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": UNTRUSTED,
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": UNTRUSTED,
}


@dataclass(slots=True)
class Handshake:
    """A server's handshake: the address it is with, "" if not known, and why it failed, None if it did not."""

    address: str = ""
    refused: TlsHandshakeError | None = None


handshake: ContextVar[Handshake | None] = ContextVar("handshake", default=None)
"""The one that begins, set by who accepts connections: event loops do not tell a context whose connection it is."""


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
    """Failed handshakes, counted by kind; of each kind one a minute is logged."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[str] = Counter()
        self._clock = clock
        self._logged_at: dict[str, float] = {}

    def add(self, address: str, error: TlsHandshakeError) -> None:
        """Count one; `address` is empty if it is not known."""
        self.counts[error.kind] += 1
        now = self._clock()
        if now - self._logged_at.get(error.kind, -LOG_INTERVAL_S) >= LOG_INTERVAL_S:
            self._logged_at[error.kind] = now
            source, count = f" from {address}" if address else "", self.counts[error.kind]
            logger.warning("refused a connection%s: %s: %s (%d so far)", source, error.kind, error, count)


class TlsContext(ssl.SSLContext):
    """A context, the refusals of its handshakes, if it is a server's, and the roles in its peers' certificates."""

    refusals: Refusals
    roles: CertificateRoles


class _ServerHandshake(ssl.SSLObject):
    """Counts a handshake that fails, and lets its alert out.

    Event loops close a connection at once when the handshake fails and drop the alert that is ready then, so that a
    client could never tell that its certificate was refused from a broken connection. So the loop is first told that
    the handshake waits for more, whereupon it sends what is ready; the client closes, or the handshake's time ends.
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
            self.context.refusals.add(self._handshake.address, refused)
            # A peer that speaks another protocol does not read alerts.
            if refused.kind == PLAIN_TEXT:
                raise
            # Without the traceback, whose frames hold this object.
            self._failure = error.with_traceback(None)
        if self._failure is not None:
            raise ssl.SSLWantReadError


def server_context(
    config: TlsConfig,
    alpn: Sequence[str] = (),
    interval_s: float = LOOK_INTERVAL_S,
    verify: ssl.VerifyMode = ssl.CERT_REQUIRED,
) -> TlsContext:
    """Return a server's context, TLS 1.2 and later, which offers `alpn` and follows its files.

    With CERT_OPTIONAL in `verify` a client that shows no certificate is let in too, and has to be told apart.
    The files are checked at most every `interval_s`. Raises TlsConfigError, naming a file that can't be read or used.
    """
    refusals, roles, files = Refusals(), CertificateRoles(config.role_uris), (config.client_ca, config.cert, config.key)

    def make() -> TlsContext:
        context = _new_context(ssl.PROTOCOL_TLS_SERVER, *files)
        context.refusals, context.roles, context.sslobject_class = refusals, roles, _ServerHandshake
        if config.client_ca is not None:
            context.verify_mode = verify
            # A ticket would let a client in again without its certificate being looked at.
            context.num_tickets = 0
            context.options |= ssl.OP_NO_TICKET
        if alpn:
            context.set_alpn_protocols(list(alpn))
        return context

    def switch(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = current.get()

    current = FileBacked([path for path in files if path is not None], make, interval_s=interval_s)
    first = current.get()
    first.sni_callback = switch
    return first


def client_context(config: TlsClientConfig, interval_s: float = LOOK_INTERVAL_S) -> FileBacked[TlsContext]:
    """Return what gives a client's context for each connection; servers are verified, their host names too.

    The files are checked at most every `interval_s`. Raises TlsConfigError, naming a file that can't be read or used.
    """
    roles, files = CertificateRoles(config.role_uris), (config.ca, config.cert, config.key)

    def make() -> TlsContext:
        context = _new_context(ssl.PROTOCOL_TLS_CLIENT, *files)
        context.roles = roles
        return context

    return FileBacked([path for path in files if path is not None], make, interval_s=interval_s)


def tls_error(error: ssl.SSLError) -> TlsHandshakeError:
    """Return what a failed handshake, or the alert that ended a connection, means."""
    if isinstance(error, ssl.SSLCertVerificationError):
        kind = EXPIRED if error.verify_code in _OUTSIDE_ITS_TIME else UNTRUSTED
        return TlsHandshakeError(f"the other side's certificate is refused: {error.verify_message}", kind=kind)
    reason = error.reason or str(error)
    if reason not in _KINDS:
        return TlsHandshakeError(reason)
    texts = {PLAIN_TEXT: "the other side does not speak TLS", MISSING: "no certificate is shown"}
    text = texts.get(_KINDS[reason], "the other side refuses this one's certificate")
    return TlsHandshakeError(f"{text} ({reason})", kind=_KINDS[reason])


def connection_failure(error: BaseException) -> NodeUnavailableError:
    """Return what ended a connection, or kept it from being made, as an error for callers."""
    if isinstance(error, ssl.SSLError):
        return tls_error(error)
    return error if isinstance(error, TlsHandshakeError) else NodeUnavailableError(str(error) or type(error).__name__)


def _new_context(protocol: int, ca: Path | None, cert: Path | None, key: Path | None) -> TlsContext:
    context = TlsContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if cert is not None and key is not None:
        # Alone at first, so that what fails afterwards is the key's fault.
        _load(cert, "certificate", ssl.SSLContext(protocol).load_verify_locations)

        def no_password() -> str:
            raise TlsConfigError(f"{key}: the key is encrypted; allowed is a PEM file without a password")

        _load(key, "private key", lambda path: context.load_cert_chain(cert, path, no_password))
    if ca is not None:
        _load(ca, "certificate", context.load_verify_locations)
        if not context.cert_store_stats()["x509_ca"]:
            raise TlsConfigError(f"{ca}: none of its certificates is of a CA")
    return context


def _load(path: Path, content: str, load: Callable[[Path], None]) -> None:
    """Load a PEM file; raise TlsConfigError, naming it."""
    try:
        path.open("rb").close()
        load(path)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise TlsConfigError(f"{path}: the key does not belong to the certificate") from None
        raise TlsConfigError(f"{path}: no usable {content} in PEM ({error.reason or error})") from None
    except OSError as error:
        raise TlsConfigError(f"{path}: {error.strerror or error}") from None
