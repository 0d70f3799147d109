"""What serving processes and shard nodes make of their flags: devices, limits, TLS, tokens, and flags of children."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import tomllib
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from serving.cli.options import snapshot_folder, validated

if TYPE_CHECKING:
    from serving.limits import RequestLimits
    from shard_node.cuda.card_set import CardOptions, CardSet
    from shard_node.wire.address import Address
    from shard_node.wire.tls import TlsClientConfig, TlsConfig

logger = logging.getLogger(__name__)

MAX_LIMITS_FILE_BYTES = 1 << 20
DEVICE_FLAGS = ("device", "card_memory_gb", "pinned_memory_gb", "hot_gb", "peer_access")
"""Names of the options, for commands that pass them on or allow them only with rows."""
_TLS = ("tls_cert", "tls_key", "tls_client_ca")
_NODE_TLS = ("node_ca", "node_cert", "node_key")


def flags(names: Iterable[str]) -> str:
    """Return options as a person writes them: `--shard, --no-verify`."""
    return ", ".join("--shard" if name == "shards" else f"--{name.replace('_', '-')}" for name in names)


def arguments(options: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return the flags that give a child process the same values, where there are any."""
    given = [(name, options[name]) for name in names if options.get(name) is not None]
    return [text for name, value in given for text in (flags([name]), str(value))]


def given_flags(ctx: click.Context) -> set[str]:
    """Return the names of the options that stand on the command line itself."""
    return {name for name in ctx.params if ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE}


def belongs_to_fleet(ctx: click.Context, fleet_only: Collection[str]) -> bool:
    """Tell whether a process gets its versions from a registry. Raises UsageError for flags of the other form."""
    given = given_flags(ctx)
    static = sorted(given & {"version", "snapshot", "shards"})
    if ctx.params["registry"] is None or (static and "registry" not in given):
        if wrong := sorted(given.intersection(fleet_only)):
            raise click.UsageError(f"{flags(wrong)}: only with --registry.")
        return False
    if static:
        raise click.UsageError(f"{flags(static)}: not with --registry, which says what is served and where rows are.")
    if ctx.params["store"] is None:
        raise click.UsageError("--registry needs --store.")
    return True


def to_bytes(gigabytes: float | None) -> int | None:
    """Return 10^9 bytes for each gigabyte."""
    return None if gigabytes is None else int(gigabytes * 1e9)


def node_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `NodeConfig` has of the flags of a process that holds rows for a fleet."""
    same = ("store", "replicate_bytes", "verify", "stage_cpu_share")
    return {name: options[name] for name in same} | {
        "memory_cap_bytes": to_bytes(options["max_memory_gb"]),
        "memory_budget_bytes": to_bytes(options["memory_budget_gb"]),
    }


def default_name(text: str) -> str:
    """Return a node id made of any text."""
    return "".join(one if one.isascii() and (one.isalnum() or one in "_.:-") else "_" for one in text)[:200]


def member_folder(options: Mapping[str, Any]) -> Path:
    """Return the folder of the one snapshot that a process without a registry serves. Raises as `snapshot_folder`."""
    models = options["models"]
    if len(models) > 1:
        raise click.UsageError("Several --model need --registry.")
    model = models[0] if models else None
    return snapshot_folder(options["store"], model, options["version"], options["snapshot"]).resolve()


def device_arguments(options: Mapping[str, Any]) -> list[str]:
    """Return the flags that give a child process the same devices. Raises DeviceChoiceError."""
    from shard_node.cuda.card_set import DeviceChoice

    DeviceChoice.parse(options["device"])
    return arguments(options, DEVICE_FLAGS)


def card_options(options: Mapping[str, Any]) -> CardOptions:
    """Return what one version may take of the cards."""
    from shard_node.cuda.card_set import CardOptions

    return CardOptions(
        card_memory_gb=options["card_memory_gb"],
        pinned_memory_gb=options["pinned_memory_gb"],
        hot_gb=options["hot_gb"],
        require_peer_access=options["peer_access"] == "required",
    )


def open_card_set(options: Mapping[str, Any]) -> CardSet | None:
    """Open the cards that the flags choose; None for the CPU. Raises as `CardSet.open`."""
    from shard_node.cuda.card_set import CardSet

    return CardSet.open(options["device"], options["cards"], card_options(options))


def num_replicas(asked: int | None, card_set: CardSet | None, *, may_wait: bool = True) -> int:
    """Choose the number of ranking replicas: as asked, one for each card, none if no row is waited for, else one.

    Args:
        asked: by `--ranking-replicas`.
        card_set: where the rows of this process are, if on cards.
        may_wait: whether rows may have to be waited for, from a shard node or from a disk.

    Raises:
        click.UsageError: for 0 where rows may have to be waited for.
    """
    if asked == 0 and (may_wait or card_set is not None):
        raise click.UsageError("--ranking-replicas 0 is only for rows that are all in this process's RAM.")
    if asked is not None:
        return asked
    if card_set is not None:
        return len(card_set.cards.cards)
    return 1 if may_wait else 0


def read_limits(path: Path | None, assignments: Sequence[tuple[str, str]]) -> RequestLimits:
    """Return the limits of a file (JSON, or TOML by its name), overridden by assignments.

    Raises:
        click.UsageError: naming the limit that is unknown or out of range, or what is wrong with the file.
    """
    from serving.limits import RequestLimits

    values = {} if path is None else _read_limits_file(path)
    return validated(RequestLimits, values | dict(assignments), "limits: ")


def limit_arguments(path: Path | None, assignments: Sequence[tuple[str, str]]) -> list[str]:
    """Return the flags that give a child process the same limits. Raises as `read_limits`, before it is started."""
    limits = read_limits(path, assignments)
    changed = {name: getattr(limits, name) for name in type(limits).model_fields if name in limits.model_fields_set}
    texts = {name: ",".join(value) if isinstance(value, tuple) else str(value) for name, value in changed.items()}
    return [argument for name, text in texts.items() for argument in ("--limit", f"{name}={text}")]


def with_proxies(options: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the `--limit` of a command, and what its `--trusted-proxy` say."""
    limits: tuple[tuple[str, str], ...] = options["limit"]
    proxies = ",".join(options["trusted_proxies"])
    return (*limits, ("trusted_proxies", proxies)) if proxies else limits


def front_arguments(options: Mapping[str, Any]) -> list[str]:
    """Return the limits, TLS files, tokens and admin port that every serving process is given. Raises UsageError."""
    limits = limit_arguments(options["limits_file"], with_proxies(options))
    return [*limits, *arguments(options, ["admin_port"]), *protection_arguments(options)]


def _read_limits_file(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MAX_LIMITS_FILE_BYTES:
        raise click.UsageError(f"{path}: more than {MAX_LIMITS_FILE_BYTES} bytes")
    text = path.read_text(encoding="utf-8")
    try:
        values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except ValueError as error:
        raise click.UsageError(f"{path}: {error}") from error
    if not isinstance(values, dict):
        raise click.UsageError(f"{path}: expected an object of limits by name")
    return values


@dataclass(frozen=True, slots=True)
class Protection:
    """Protection that the options ask for; every file was read once.

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
        """Read the options of a command, those that it has.

        Raises:
            UsageError: flags that need another one.
            TlsConfigError, TokensFileError: a file can't be read or does not fit; it is named.
        """
        tls, node_tls = _server_tls(options), _node_tls(options)
        tokens: Path | None = options.get("tokens")
        if tls is not None or node_tls is not None:
            from shard_node.wire.tls import client_context, server_context

            if tls is not None:
                server_context(tls)
            if node_tls is not None:
                client_context(node_tls)
        if tokens is not None:
            from serving.api.tokens import read_tokens

            read_tokens(tokens)
        return cls(tls, node_tls, tokens)


def protection_arguments(options: Mapping[str, Any]) -> list[str]:
    """Return the flags for children that serve. Links are kept: a link that is set anew is how secrets change."""
    files = {name: options.get(name) for name in (*_TLS, *_NODE_TLS, "tokens")}
    return arguments({name: None if file is None else file.absolute() for name, file in files.items()}, files)


def warn_if_open(host: str, protection: Protection) -> None:
    """Log one warning if others than this machine can reach the APIs, and anybody may ask or listen in."""
    if is_loopback(host):
        return
    tls = protection.tls
    missing = [] if tls is not None else ["TLS (--tls-cert)"]
    if protection.tokens is None and (tls is None or tls.client_ca is None):
        missing.append("tokens (--tokens) or client certificates (--tls-client-ca)")
    if missing:
        logger.warning("listens on %s without %s: for a private network only", host, " and without ".join(missing))


def warn_if_node_is_open(addresses: Sequence[Address], tls: TlsConfig | None) -> None:
    """Log one warning if others than this machine can reach a shard node, which then answers everybody."""
    reachable = [str(address) for address in addresses if not address.is_unix and not is_loopback(address.host)]
    if reachable and tls is None:
        logger.warning("listens on %s without TLS (--tls-cert): for a private network only", ", ".join(reachable))


def is_loopback(host: str) -> bool:
    """Tell whether only this machine reaches what listens there. A name other than `localhost` is not looked up."""
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
    from shard_node.wire.tls import TlsConfig

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
    from shard_node.wire.tls import TlsClientConfig

    if cert is None:
        cert, key = options["tls_cert"], options["tls_key"]
    return TlsClientConfig(ca=ca, cert=cert, key=key)


def run_until_stopped(
    program: Callable[[], Awaitable[None]], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
) -> None:
    """Run a program until SIGTERM or SIGINT, which is how it should end."""
    from serving.fleet.process import StopRequestedError, run_until_signalled

    try:
        run_until_signalled(program, loop_factory=loop_factory)
    except StopRequestedError as stop:
        logger.info("stopped by %s", stop)
