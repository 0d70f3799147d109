"""Settings of a fleet, of its coordinator, and of the processes that follow from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Self, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator

from loader.rollout import CoordinatorConfig
from serving.cli.settings import registry_url
from serving.config import (
    DivisionSettings,
    FrontSettings,
    LogSettings,
    RowSettings,
    ServeConfig,
    ShardNodeConfig,
    StoreSettings,
    TraceSettings,
)
from serving.settings import Settings, seconds, setting

Child = TypeVar("Child", bound=Settings)


class CoordinatorSettings(CoordinatorConfig, LogSettings, StoreSettings):
    """What `shardrank coordinator` runs by."""

    owner: str | None = setting(None, file_only=True)
    """In whose name the lock is acquired. Default: of this process."""

    @field_validator("stage_timeout_s", "step_timeout_s", "step_delay_s", mode="before")
    @classmethod
    def _read_time(cls, value: Any) -> Any:
        return seconds(value)


class SupervisionConfig(Settings):
    """How patient a supervisor is. All times in seconds."""

    ready_timeout_s: float = Field(default=600.0, gt=0)
    probe_interval_s: float = Field(default=0.05, gt=0)
    probe_timeout_s: float = Field(default=2.0, gt=0)
    stop_grace_s: float = Field(default=15.0, gt=0)
    first_backoff_s: float = Field(default=0.1, gt=0)
    max_backoff_s: float = Field(default=5.0, gt=0)
    healthy_after_s: float = Field(default=30.0, gt=0)


class FleetConfig(FrontSettings, RowSettings, DivisionSettings, StoreSettings):
    """What `shardrank up` runs by: a coordinator, shard nodes and serving processes over one store."""

    models: tuple[str, ...] = setting((), "--model NAME", max_length=256)
    """What to serve; default: all of the store, and what is rolled out later."""
    version: int | None = setting(None, ge=1)
    """What the one model begins with. Default: the version that was live last; the first time, the store's newest that
    passes its checks."""
    versions: dict[str, int] = setting({}, file_only=True)
    """The same by model, of several."""
    snapshot: Path | None = setting(None, "FOLDER")
    """A snapshot's own folder, in place of --store, --model and --version."""
    shards: int = setting(2, ge=1, le=64)
    """Shards."""
    replicas: int = setting(1, ge=1, le=16)
    """Nodes of each shard."""
    verify: bool = True
    """Compare every file's SHA-256 before serving; leave it out only for a local store that you trust."""
    log_dir: Path | None = setting(None, "FOLDER")
    """Keep the logs of the processes here. Default: a temporary folder, which stays only if one of them failed."""
    serve: dict[str, Any] = setting({}, file_only=True)
    """Further settings of each serving process, by field; a table of a file."""
    shard_node: dict[str, Any] = setting({}, file_only=True)
    """Further settings of each shard node, by field; a table of a file."""
    coordinator: dict[str, Any] = setting({}, file_only=True)
    """Further settings of each coordinator, by field; a table of a file."""

    supervision: SupervisionConfig = Field(default_factory=SupervisionConfig, exclude=True)
    environment: dict[str, str] = Field(default_factory=dict, exclude=True)
    processes: dict[str, dict[str, Any]] = Field(default_factory=dict, exclude=True)
    """Settings of single shard nodes and serving processes, by name; they replace all others."""

    @model_validator(mode="after")
    def _check_fleet(self) -> Self:
        if len(set(self.models)) != len(self.models):
            raise ValueError(f"models has duplicates: {list(self.models)}")
        if self.models and (unknown := sorted(self.versions.keys() - set(self.models))):
            raise ValueError(f"versions of models that are not served: {unknown}")
        if self.store is not None:
            self.serve_config("serve-0")
            self.shard_node_config(next(iter(self.shard_nodes)), "unix:/socket")
            self.coordinator_config("coordinator")
        return self

    @property
    def registry_url(self) -> str:
        """The registry that was named, or that of the store. Raises click.UsageError."""
        return registry_url(self.registry, self.store_place)

    @property
    def shard_nodes(self) -> dict[str, int]:
        """The shard of each node, by name; children and nodes have the same names."""
        names = ((shard, replica) for shard in range(self.shards) for replica in range(self.replicas))
        return {f"shard-{shard}-{replica}": shard for shard, replica in names}

    @property
    def worker_names(self) -> list[str]:
        """Names of the serving processes."""
        return [f"serve-{worker}" for worker in range(self.workers)]

    def coordinator_config(self, owner: str) -> CoordinatorSettings:
        """Return the settings of a coordinator: one that comes after another is the same owner."""
        return self._child(CoordinatorSettings, "coordinator", {"owner": owner}, LogSettings)

    def shard_node_config(self, name: str, listen: str) -> ShardNodeConfig:
        """Return the settings of one of `shard_nodes`."""
        values = {"node_id": name, "shard": (self.shard_nodes[name], self.shards), "listen": (listen,)}
        shared = StoreSettings, RowSettings, DivisionSettings, LogSettings, TraceSettings
        return self._child(ShardNodeConfig, "shard_node", values, *shared)

    def serve_config(self, name: str) -> ServeConfig:
        """Return the settings of one of `worker_names`."""
        values = {"node_id": name, "plan_file": self.plan_file, **self.of_worker(self.worker_names.index(name))}
        return self._child(ServeConfig, "serve", values, StoreSettings, FrontSettings)

    def _child(self, schema: type[Child], section: str, values: dict[str, Any], *shared: type[Settings]) -> Child:
        """Return the settings of a process: these values, those of its section, and what it shares with the fleet.

        Raises ValueError for a section that does not fit.
        """
        values["registry"], given = self.registry_url, getattr(self, section)
        listening = {"host", "http_port", "grpc_port", "admin_port", "probe_port"}
        if fixed := sorted((values.keys() | listening) & given.keys()):
            raise ValueError(f"{section}.{fixed[0]}: the fleet sets it for each process.")
        names = {"models", "verify"}.union(*(part.names() for part in shared))
        of_fleet = {name: getattr(self, name) for name in names & schema.model_fields.keys()}
        try:
            values |= self.processes.get(values.get("node_id", ""), {})
            return schema.model_validate(of_fleet | given | values, context={"given": {*given}})
        except ValidationError as error:
            item = error.errors(include_url=False)[0]
            raise ValueError(f"{'.'.join(map(str, (section, *item['loc'])))}: {item['msg']}") from error


PROCESSES: Final[tuple[type[Settings], ...]] = (ServeConfig, ShardNodeConfig, CoordinatorSettings, FleetConfig)
KNOWN_VARIABLES: Final = frozenset({f"SHARDRANK_{name.upper()}" for schema in PROCESSES for name in schema.names()})
"""What sets a field of one of them. Children get theirs from a file, and none of these variables."""
