"""Options that keep strangers out, TLS and tokens: how they reach child processes, and a warning without them."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from shard_node.address import Address
    from shard_node.tls import TlsClientConfig, TlsConfig

logger = logging.getLogger(__name__)

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

_TLS = ("tls_cert", "tls_key", "tls_client_ca")
_NODE_TLS = ("node_ca", "node_cert", "node_key")


def _file_option(flag: str, help_text: str) -> Callable[[Decorated], Decorated]:
    return click.option(flag, type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help=help_text)


def tls_options(client_ca_help: str) -> Callable[[Decorated], Decorated]:
    """`--tls-cert`, `--tls-key`, `--tls-client-ca`."""

    def decorate(function: Decorated) -> Decorated:
        function = _file_option("--tls-client-ca", client_ca_help)(function)
        function = _file_option("--tls-key", "Private key of --tls-cert, PEM, without a password.")(function)
        return _file_option(
            "--tls-cert",
            "Speak TLS with this certificate (PEM, with those between it and its CA). Files of TLS are read again when "
            "they change; open connections stay.",
        )(function)

    return decorate


def node_tls_options(function: Decorated) -> Decorated:
    """`--node-ca`, `--node-cert`, `--node-key`."""
    function = _file_option("--node-key", "Private key of --node-cert. Default: --tls-key.")(function)
    function = _file_option(
        "--node-cert", "Certificate to show to shard nodes. Default: --tls-cert, if shard nodes are spoken to by TLS."
    )(function)
    return _file_option(
        "--node-ca",
        "Speak TLS to shard nodes at TCP addresses, with certificates of these CAs. Default: --tls-client-ca.",
    )(function)


def tokens_option(function: Decorated) -> Decorated:
    """`--tokens`."""
    return _file_option(
        "--tokens",
        "Let in only who has one of these tokens; see `shardrank token new`. Probes need none. Read again on change.",
    )(function)


@dataclass(frozen=True, slots=True)
class Protection:
    """What the options ask for; every file was read once.

    Attributes:
        tls: spoken by clients; None for plain text.
        node_tls: how shard nodes at TCP addresses are spoken to; None for plain text.
        tokens: file of those who are let in; None for everybody.
    """

    tls: TlsConfig | None
    node_tls: TlsClientConfig | None
    tokens: Path | None

    @property
    def scheme(self) -> str:
        """Of URLs."""
        return "http" if self.tls is None else "https"

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Protection:
        """Reads the options of a command, those that it has.

        Raises:
            UsageError: flags that need another one.
            TlsConfigError, TokensFileError: a file can't be read or does not fit; it is named.
        """
        tls, node_tls = _server_tls(options), _node_tls(options)
        tokens: Path | None = options.get("tokens")
        if tls is not None or node_tls is not None:
            from shard_node.tls import client_context, server_context

            if tls is not None:
                server_context(tls)
            if node_tls is not None:
                client_context(node_tls)
        if tokens is not None:
            from serving.api.tokens import read_tokens

            read_tokens(tokens)
        return cls(tls, node_tls, tokens)


def protection_arguments(options: Mapping[str, Any]) -> list[str]:
    """The flags for child processes that serve. Links are kept: a link that is set anew is how secrets change."""
    given = [(name, options.get(name)) for name in (*_TLS, *_NODE_TLS, "tokens")]
    return [part for name, path in given if path is not None for part in (_flag(name), str(path.absolute()))]


def warn_if_open(host: str, protection: Protection) -> None:
    """Logs one warning if others than this machine can reach the APIs, and anybody may ask or listen in."""
    if is_loopback(host):
        return
    tls = protection.tls
    missing = [] if tls is not None else ["TLS (--tls-cert)"]
    if protection.tokens is None and (tls is None or tls.client_ca is None):
        missing.append("tokens (--tokens) or client certificates (--tls-client-ca)")
    if missing:
        logger.warning("listens on %s without %s: for a private network only", host, " and without ".join(missing))


def warn_if_node_is_open(addresses: Sequence[Address], tls: TlsConfig | None) -> None:
    """Logs one warning if others than this machine can reach a shard node, which then answers everybody."""
    reachable = [str(address) for address in addresses if not address.is_unix and not is_loopback(address.host)]
    if reachable and tls is None:
        logger.warning("listens on %s without TLS (--tls-cert): for a private network only", ", ".join(reachable))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there. A name other than `localhost` is not looked up."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def _server_tls(options: Mapping[str, Any]) -> TlsConfig | None:
    cert, key, client_ca = (options[name] for name in _TLS)
    if cert is None and key is None and client_ca is None:
        return None
    if cert is None or key is None:
        raise click.UsageError("--tls-cert and --tls-key belong together, and --tls-client-ca needs both.")
    from shard_node.tls import TlsConfig

    return TlsConfig(cert=cert, key=key, client_ca=client_ca)


def _node_tls(options: Mapping[str, Any]) -> TlsClientConfig | None:
    ca, cert, key = (options.get(name) for name in _NODE_TLS)
    if (cert is None) != (key is None):
        raise click.UsageError("--node-cert and --node-key belong together.")
    ca = ca or options["tls_client_ca"]
    if ca is None:
        if cert is not None:
            raise click.UsageError("--node-cert needs --node-ca or --tls-client-ca.")
        return None
    from shard_node.tls import TlsClientConfig

    if cert is None:
        cert, key = options["tls_cert"], options["tls_key"]
    return TlsClientConfig(ca=ca, cert=cert, key=key)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
