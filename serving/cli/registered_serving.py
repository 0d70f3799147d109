"""A serving process of a fleet: from the flags of `shardrank serve --registry` to a running `ServingNode`."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import click

from loader.manifest import ModelSpec
from loader.progress import BACKGROUND_SWITCH_INTERVAL_S
from loader.registry.opening import open_registry
from loader.registry.typed import FleetRegistry
from router.plan import Plan
from serving.cli.devices import device_arguments, num_replicas, open_card_set
from serving.fleet.local_fleet import held_ports
from serving.limits import RequestLimits
from serving.observe.profile import profiled
from serving.rank.service import RankingService
from serving.server import Listening, ServerConfig, serve_until_signalled
from serving.versions.serving_node import LocalRows, ServingConfig, ServingNode
from shard_node.agent import AgentConfig
from shard_node.cuda.card_set import CardSet
from shard_node.node import NodeIdentity, Partition, ShardNode
from shard_node.node_agent import NodeActions, NodeConfig
from shard_node.tls import TlsClientConfig

ANY_HOST = frozenset({"0.0.0.0", "::", ""})
_WORKER_FLAGS = (
    *("advertise", "ranking_replicas", "dtype", "stage_cpu_share", "shutdown_delay_s"),
    *("cards", "sharding", "replicate_bytes", "memory_budget_gb", "max_memory_gb"),
)
_LOCAL_FLAGS = frozenset({"cards", "sharding", "replicate_bytes", "memory_budget_gb", "max_memory_gb"})


def run_registered(
    options: dict[str, Any],
    limits: RequestLimits,
    config: ServerConfig,
    node_tls: TlsClientConfig | None,
    say: Callable[[Listening], None],
) -> None:
    """Serves until SIGTERM or SIGINT; then leaves the fleet, ends what is in flight, and returns.

    Args:
        options: the flags of `shardrank serve`, by name.
        limits: of requests.
        config: where to listen.
        node_tls: how shard nodes at TCP addresses are spoken to; None for plain text.
        say: told the ports, once the process is ready.

    Raises:
        RegistryRecordError: the URL is none. A registry that does not answer is waited for.
        ShardNodeError: the devices can't be had.
        ListenError, FleetError: a port can't be bound.
    """
    # A thread that loads holds the interpreter for this long at most while a request waits for it.
    sys.setswitchinterval(BACKGROUND_SWITCH_INTERVAL_S)
    models: tuple[str, ...] = options["models"]
    service = RankingService(
        limits, expected_models=models or None, max_staleness_s=staleness_limits(options["max_staleness"], models)
    )
    fleet = FleetRegistry(open_registry(options["registry"]))
    node_id = options["node_id"] or default_node_id(config)
    card_set = None
    if options["local"]:
        card_set = open_card_set(options)
    serving = ServingConfig.model_validate(
        {name: options[name] for name in ("store", "verify", "dtype", "stage_cpu_share")}
        | {
            "node_id": node_id,
            "node_tls": node_tls,
            "num_replicas": num_replicas(options["ranking_replicas"], card_set),
        }
    )
    local = _local_rows(options, fleet, node_id, card_set) if options["local"] else None
    node = ServingNode(fleet, service, serving, AgentConfig(models=models or None), local)

    def on_listening(listening: Listening) -> None:
        node.address = options["advertise"] or advertised(listening, "http" if config.tls is None else "https")

    if options["probe_port"] is None:
        # One that stands alone must not share the ports of another server.
        with held_ports(config.host, config.http_port, config.grpc_port, workers=0):
            pass
    with profiled(options["profile"], service.metrics):
        serve_until_signalled(service, config, node.load, say, options["probe_port"], on_listening, node.leave)


def worker_arguments(options: dict[str, Any]) -> list[str]:
    """The flags of one worker, but ports, limits, its node id, and the registry, which may have a password in it."""
    arguments = ["--store", str(options["store"].resolve()), "--verify" if options["verify"] else "--no-verify"]
    for model in options["models"]:
        arguments += ["--model", model]
    for model, limit_s in options["max_staleness"]:
        arguments += ["--max-staleness", f"{model}={limit_s}"]
    if options["local"]:
        arguments.append("--local")
    for name in _WORKER_FLAGS:
        if options[name] is not None and (options["local"] or name not in _LOCAL_FLAGS):
            arguments += [f"--{name.replace('_', '-')}", str(options[name])]
    return arguments + device_arguments(options) if options["local"] else arguments


def worker_node_ids(options: dict[str, Any]) -> list[str]:
    """One for each worker: the given one, or the default, with its number behind it."""
    name = options["node_id"] or _default_node_id(options["http_port"])
    return [f"{name}-{worker}" for worker in range(options["workers"])]


def default_node_id(config: ServerConfig) -> str:
    """`serve-<host>-<HTTP port>`; of a process that takes any port its number, which is another one next time."""
    return _default_node_id(config.http_port)


def advertised(listening: Listening, scheme: str = "http") -> str:
    """Where others reach it over HTTP: every interface stands for this host's name."""
    host = socket.gethostname() if listening.host in ANY_HOST else listening.host
    return f"{scheme}://[{host}]:{listening.http_port}" if ":" in host else f"{scheme}://{host}:{listening.http_port}"


def staleness_limits(pairs: tuple[tuple[str, str], ...], models: tuple[str, ...]) -> dict[str, float]:
    """`--max-staleness` by model. Raises UsageError for what is no number above 0, and for another model."""
    limits: dict[str, float] = {}
    for model, text in pairs:
        try:
            limit_s = float(text)
        except ValueError:
            limit_s = 0.0
        if not 0 < limit_s < float("inf"):
            raise click.UsageError(f"--max-staleness {model}={text}: seconds must be a number above 0.")
        if models and model not in models:
            raise click.UsageError(f"--max-staleness {model}={text}: {model} is not among the --model: {list(models)}.")
        limits[model] = limit_s
    return limits


def _default_node_id(http_port: int) -> str:
    place = str(http_port) if http_port else f"pid{os.getpid()}"
    text = f"serve-{socket.gethostname()}-{place}"
    return "".join(one if one.isascii() and (one.isalnum() or one in "_.:-") else "_" for one in text)[:200]


def _local_rows(options: dict[str, Any], fleet: FleetRegistry, node_id: str, card_set: CardSet | None) -> LocalRows:
    """Rows in this process: one shard that has them all, whatever a fleet of shard nodes would say."""

    def plan(spec: ModelSpec) -> Plan:
        return Plan.make(spec, 1, options["sharding"], options["cards"], options["replicate_bytes"])

    def partition(spec: ModelSpec) -> tuple[Partition, str]:
        planned = plan(spec)
        return planned.partition(0), planned.digest

    config = NodeConfig(
        node_id=node_id,
        address="",
        store=options["store"],
        replicate_bytes=options["replicate_bytes"],
        verify=options["verify"],
        memory_cap_bytes=_bytes(options["max_memory_gb"]),
        memory_budget_bytes=_bytes(options["memory_budget_gb"]),
        stage_cpu_share=options["stage_cpu_share"],
    )
    identity = {"shard_index": 0, "num_shards": 1, "num_cards": options["cards"], "sharding": options["sharding"]}
    node = ShardNode(NodeIdentity.model_validate(identity))
    return LocalRows(node, NodeActions(node, fleet, partition, config, card_set=card_set), plan)


def _bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else int(gigabytes * 1e9)
