"""Settings of processes: a frozen model for each, whose fields are the flags, the variables and the file's keys.

A process gets a field from its flag, else from the variable `SHARDRANK_<FIELD>`, else from the file of `--config`, else
its default (serving/cli/configured.py). Values are parsed, and what does not go together is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Self

from pydantic import FilePath, ValidationInfo, model_validator

from loader.errors import ConfigError
from serving.observe.logs import LogFormat, LogLevel
from serving.settings import Limits, Policy, Settings, Shard, Staleness, Store, WhenStales, setting
from shard_node.training.clocks import ConsistencyText

if TYPE_CHECKING:
    from loader.stores.cache import StorePlace

DEFAULT_REPLICATE_BYTES: Final = 1 << 20
DEFAULT_PINNED_GB: Final = 16.0
"""Repeated from the router and the engine, which are heavy to import; tests compare them."""


class StoreSettings(Settings):
    """Where a fleet's registry is, and where versions are."""

    registry: str | None = setting(None, "URL")
    """redis://…, rediss://… or redis+sentinel://HOST,HOST/MASTER (with ?fleet=NAME for one of several), or a folder.
    Use the variable SHARDRANK_REGISTRY if it has a password."""
    store: Store | None = setting(None, "FOLDER|URL")
    """What holds <model>/<version>/ snapshots: a folder, or s3://, gs:// or az://BUCKET/PREFIX."""
    store_cache: Path | None = setting(None, "FOLDER")
    """Of a store at a URL: the folder that versions are fetched into, which processes of a machine may share. Default:
    ~/.cache/shardrank/stores."""
    store_cache_gb: float | None = setting(None, "GB", gt=0)
    """What that folder may hold, in 10^9 bytes; what was used longest ago goes. Default: 100."""
    store_timeout_s: float | None = setting(None, file_only=True, gt=0, le=3600)
    """How long a store at a URL may take for one request, retries included. Default: 60."""

    @property
    def store_place(self) -> StorePlace | None:
        """The store, with what goes with a URL. Raises StoreError."""
        if self.store is None:
            return None
        from loader.stores.cache import store_place

        cache_bytes = None if self.store_cache_gb is None else int(self.store_cache_gb * 1e9)
        values = {"cache": self.store_cache, "cache_bytes": cache_bytes, "timeout_s": self.store_timeout_s}
        return store_place(self.store, **{name: value for name, value in values.items() if value is not None})

    @property
    def named_store(self) -> StorePlace:
        """The store. Raises ConfigError if none was named, StoreError."""
        if self.store_place is None:
            raise ConfigError("name a store: --store FOLDER|URL")
        return self.store_place

    @model_validator(mode="after")
    def _check_store(self, info: ValidationInfo) -> Self:
        wrong = self.given(info) & {"store_cache", "store_cache_gb", "store_timeout_s"}
        if isinstance(self.store_place, Path) and wrong:
            raise ValueError(f"{self.labels(wrong)}: only with a --store at a URL.")
        return self


class MemberSettings(StoreSettings):
    """What a process serves: a version that is named, or what its fleet's registry says."""

    models: tuple[str, ...] = setting((), "--model NAME")
    """With --registry only this model, repeatable; default: all that are rolled out, now or later. Without, the model;
    default: the only one."""
    version: int | None = setting(None, ge=1)
    """Without --registry: the version; default: the store's newest, of one worker with its rows the newest that passes
    its checks."""
    snapshot: Path | None = setting(None, "FOLDER")
    """Without --registry: the snapshot's own folder, in place of --store, --model, --version."""
    node_id: str | None = setting(None, "NAME", pattern=r"^[A-Za-z0-9_.:\-]{1,200}$")
    """With --registry: the process' name, the same after a restart. Default: made of host, port and shard."""
    advertise: str | None = setting(None, "ADDRESS")
    """With --registry: where others reach this process."""
    stage_cpu_share: float = setting(0.5, file_only=True, ge=0.01, le=1)
    """With --registry: share of one core for loading a version beside the live one."""
    stage_retry_s: float = setting(60.0, "S", ge=0, le=86400)
    """How long a version is tried again whose files can't be read, or are not there yet; then it is refused."""
    verify: bool = True
    """Compare every file's SHA-256 before serving; leave it out only for a local store that you trust."""

    @property
    def in_fleet(self) -> bool:
        """Whether versions come from a registry."""
        return self.registry is not None

    @property
    def takes_newest(self) -> bool:
        """Whether it serves the newest version of a store that passes: nobody says which one."""
        return not self.in_fleet and self.version is None and self.snapshot is None

    @model_validator(mode="after")
    def _check_member(self, info: ValidationInfo) -> Self:
        given = self.given(info)
        static = given & {"version", "snapshot", "shards"}
        if not self.in_fleet:
            of_fleet = {"advertise", "node_id", "max_memory_gb", "stage_cpu_share"}
            of_fleet |= {"local", "max_staleness", "when_stale"}
            if wrong := given & of_fleet:
                raise ValueError(f"{self.labels(wrong)}: only with --registry.")
            if len(self.models) > 1:
                raise ValueError("Several --model need --registry.")
        elif static:
            where = "not with --registry or SHARDRANK_REGISTRY, which says what is served and where rows are"
            raise ValueError(f"{self.labels(static)}: {where}.")
        elif self.store is None:
            raise ValueError("--registry needs --store.")
        return self


class DivisionSettings(Settings):
    """How rows are divided over shards and cards."""

    cards: int = setting(1, ge=1, le=64)
    """Cards of each shard node: GPUs, or logical cards on one (see --device); on the CPU arenas of rows."""
    sharding: Literal["hash", "range", "table"] = "hash"
    """What a shard owns: rows by hash, contiguous ranges of rows, or whole tables. hash needs tables exported with the
    bucketing mixed, range with range, except those that --replicate-bytes or a single shard leaves whole."""
    plan_file: FilePath | None = setting(None, "--plan FILE")
    """A plan file of `shardrank plan --out`, in place of --sharding. Default: the one in the snapshot, if it is for as
    many shards."""
    replicate_bytes: int = setting(DEFAULT_REPLICATE_BYTES, ge=0)
    """Tables of at most this many bytes are held whole by every shard."""


class RowSettings(Settings):
    """Where the rows of a process are, and what memory they may use."""

    memory_budget_gb: float | None = setting(None, file_only=True, ge=0)
    """RAM for rows, in 10^9 bytes; of the largest tables beyond it the hottest rows are in RAM, all others on disk.
    Default: all in RAM. With GPUs, RAM for rows that no card has room for, if that is less than pinned_memory_gb."""
    max_memory_gb: float | None = setting(None, file_only=True, ge=0)
    """With --registry: RAM for the rows of all versions together, on each process that has rows, in 10^9 bytes. A
    version beyond it is refused before it is loaded. Default: what is available."""
    device: str = setting("auto", "DEVICE")
    """Where rows lie and are pooled: cpu; cuda (one GPU for each card); cuda:0 or cuda:0,1 (these, with several logical
    cards on each if there are more cards); or auto: GPUs if CuPy and one for each card are here."""
    card_memory_gb: float | None = setting(None, file_only=True, gt=0)
    """With GPUs: memory of each card for the rows of one version, in 10^9 bytes. Default: half of what is free at the
    start, so that two versions fit side by side."""
    pinned_memory_gb: float = setting(DEFAULT_PINNED_GB, "GB", ge=0)
    """With GPUs: host memory for rows that no card has room for, which cards read in place. A version with more rows is
    refused."""
    hot_gb: float | None = setting(None, file_only=True, ge=0)
    """With GPUs: memory of each card for copies of the hottest rows, which every card has. Default: what is left when
    all rows are on cards, else a sixteenth."""
    peer_access: Literal["auto", "required"] = setting("auto", file_only=True)
    """With GPUs: required refuses to start unless every card reads the memory of every other. auto goes on without:
    then rows are on all cards, or in pinned host memory."""


class TlsSettings(Settings):
    """The certificate of a server, and who is let in."""

    tls_cert: Path | None = setting(None, "FILE")
    """Speak TLS with this certificate (PEM, with those between it and its CA). Files of TLS are read again when they
    change; open connections stay."""
    tls_key: Path | None = setting(None, "FILE")
    """Private key of --tls-cert, PEM, without a password."""
    tls_client_ca: Path | None = setting(None, "FILE")
    """Let in only clients with a certificate of these CAs; a shard node's must be given."""

    @property
    def scheme(self) -> str:
        """Of the URLs at which the server answers."""
        return "http" if self.tls_cert is None else "https"

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        pair = (self.tls_cert, self.tls_key)
        if pair.count(None) == 1 or (self.tls_client_ca is not None and self.tls_cert is None):
            raise ValueError("--tls-cert and --tls-key belong together, and --tls-client-ca needs both.")
        return self


class RoleSettings(TlsSettings):
    """The roles of certificates on the wire."""

    tls_role: tuple[str, ...] = setting((), "ROLE=URI", file_only=True)
    """On the wire, a URI in certificates (subjectAltName) that stands for the role router, node, operator or trainer,
    such as a SPIFFE id, beside shardrank:ROLE."""

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.tls_role and self.tls_client_ca is None and getattr(self, "node_ca", None) is None:
            raise ValueError("--tls-role needs --tls-client-ca or --node-ca.")
        return self


class NodeTlsSettings(RoleSettings):
    """The certificate that is shown to shard nodes."""

    node_ca: Path | None = setting(None, "FILE")
    """Speak TLS to shard nodes at TCP addresses, with certificates of these CAs. Default: --tls-client-ca."""
    node_cert: Path | None = setting(None, "FILE")
    """Certificate to show to shard nodes. Default: --tls-cert, if TLS is spoken to them."""
    node_key: Path | None = setting(None, "FILE")
    """Private key of --node-cert. Default: --tls-key."""

    @model_validator(mode="after")
    def _check_node_tls(self) -> Self:
        if (self.node_cert is None) != (self.node_key is None):
            raise ValueError("--node-cert and --node-key belong together.")
        if self.node_cert is not None and self.node_ca is None and self.tls_client_ca is None:
            raise ValueError("--node-cert needs --node-ca or --tls-client-ca.")
        return self


class LogSettings(Settings):
    """What is logged."""

    log_level: LogLevel = "info"
    """How much to log to stderr."""
    log_format: LogFormat = "text"
    """Lines of text, or each of them a JSON object."""


class TraceSettings(Settings):
    """Where traces are sent."""

    trace_endpoint: str | None = setting(None, "URL")
    """Send traces of sampled requests to this OpenTelemetry collector, over OTLP; needs the extra otel. Default: what
    OTEL_EXPORTER_OTLP_ENDPOINT says, else nowhere. docs/traces.md."""
    trace_protocol: Literal["grpc", "http"] | None = setting(None, file_only=True)
    """OTLP over gRPC or HTTP. Default: what OTEL_EXPORTER_OTLP_PROTOCOL says, else grpc at port 4317, and http."""


class FrontSettings(TlsSettings, LogSettings, TraceSettings):
    """Ports of serving processes, and how they rank; `up` passes them on to its serving processes."""

    host: str = setting("127.0.0.1", "HOST")
    """Address to listen on."""
    http_port: int = setting(8080, "PORT", ge=0, le=65535)
    """HTTP port; 0 takes a free one."""
    grpc_port: int = setting(8081, "PORT", ge=0, le=65535)
    """gRPC port; 0 takes a free one."""
    admin_port: int | None = setting(None, "PORT", ge=0, le=65535)
    """A port for probes, /metrics and the status page at /, with a thread of its own, shared by all workers; 0 takes a
    free one."""
    tokens: Path | None = setting(None, "FILE")
    """Let in only who has one of these tokens; see `shardrank token new`. Probes need none. Read again on change."""
    access_log: bool = False
    """Log a line for each request: model, version, candidates, status, ms, request id; see docs/logs.md."""
    workers: int = setting(1, ge=1, le=64)
    """Serving processes that share the ports; each holds all rows, if it holds any."""
    ranking_replicas: int | None = setting(None, file_only=True, ge=0, le=64)
    """Ranking replicas of each serving process; each is a thread that scores one batch at a time. With rows on GPUs in
    this process they take turns over the cards. 0: the event loop scores between requests, the default where rows are
    in this process's RAM or on shard nodes. Else 1, or one for each GPU."""
    dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    """Number format of the dense model; auto: the fastest that the device has (int8, bfloat16, float32) and golden
    scores allow."""
    wire_dtype: Literal["auto", "float32", "float16", "int8"] = setting("auto", file_only=True)
    """Number format in which shard nodes send sums of rows; auto: the narrowest that golden scores allow. Rows that
    need no adding travel as they are stored, and lose nothing."""
    replica_policy: Policy = setting({}, file_only=True)
    """When a shard's replicas are asked twice and when one is ejected, such as hedge_after_ms = 50; docs/api.md lists
    what there is."""
    limits: Limits = setting({}, "--limit NAME=VALUE")
    """A limit, such as max_candidates=500; docs/api.md lists them. In a file, a table."""
    hot_rows_gb: float | None = setting(None, "GB", ge=0)
    """Copies of the hottest rows in each serving process, of rows on shard nodes: memory for one version's, index
    included, in 10^9 bytes. 0: none. Default: of versions with access counts on more than 4 shards, in at most 1/16 of
    the memory limit, which all workers and two versions share; the log says for each version why or why not."""
    hot_rows: Literal["learning", "static"] = setting("learning", file_only=True)
    """What is held: learning, the rows looked up most recently; static, those of the snapshot's access counts."""
    dense_step_wait_s: float = setting(30.0, "S", ge=0, le=86400)
    """After how long the snapshot's own dense weights answer where rows lack the row updates that a dense step needs;
    until then such requests fail with 503. docs/deltas.md."""
    trust_exported: bool = False
    """Run exported programs (dense.pt2). They are code and can do whatever this process can: only for a store to which
    nobody writes whom you do not trust. Without, a version that has one is refused."""
    trace_sample_share: float | None = setting(None, file_only=True, ge=0, le=1)
    """Of requests whose `traceparent` says nothing of sampling, the share that is sampled. Default: 0.01."""
    record: Path | None = setting(None, "FOLDER")
    """Record a share of the rank requests that are answered in this folder, with their scores: for `loadtest replay`,
    and to warm new versions with. Ids, weights and floats; no headers, tokens or keys."""
    record_share: float = setting(0.01, "SHARE", gt=0, le=1)
    """How many of them, above 0 and up to 1."""
    record_max_mb: int = setting(256, file_only=True, ge=1, le=10_000_000)
    """Bytes of the folder at most, in 10^6; the oldest go first."""

    def of_worker(self, worker: int) -> dict[str, object]:
        """Return what one of the serving processes has else: a folder in the folder, and its part of the bytes."""
        folder = None if self.record is None else self.record / str(worker)
        return {"workers": 1, "record": folder, "record_max_mb": max(1, self.record_max_mb // self.workers)}


class ServeConfig(FrontSettings, NodeTlsSettings, RowSettings, DivisionSettings, MemberSettings):
    """What `shardrank serve` runs by."""

    advertise: str | None = setting(None, "URL")
    """With --registry: where this process is reached over HTTP, for people to read. Default: host and port."""
    shards: tuple[str, ...] = setting((), "--shard ADDRESS[,ADDRESS...]")
    """Without --registry: the replicas of a shard; the first --shard is shard 0, the second shard 1, and so on. Without
    any, the rows are loaded into this process."""
    local: bool = False
    """With --registry: load the rows into this process, swap them and apply row updates here."""
    max_staleness: Staleness = setting({}, "MODEL=SECONDS")
    """With --registry: how far a model's rows may be behind its row updates before /readyz calls it degraded."""
    when_stale: WhenStales = setting({}, "MODEL=ACTION")
    """What becomes of requests for rows older than --max-staleness: answer (the default); other-replica, others are
    asked and the newest rows answer; refuse, likewise, and if all are too old the request fails (rows_stale)."""
    shutdown_delay_s: float = setting(0.5, "S", ge=0, le=600)
    """After SIGTERM, how long requests are still taken while /readyz says that the process is not ready."""
    probe_port: int | None = setting(None, file_only=True, ge=0, le=65535)
    """A private HTTP port of this one worker, on loopback."""

    @property
    def has_rows(self) -> bool:
        """Whether the rows are in this process."""
        return self.local if self.in_fleet else not self.shards

    @model_validator(mode="after")
    def _check_rows(self, info: ValidationInfo) -> Self:
        given = self.given(info)
        of_rows = {"memory_budget_gb", "device", "card_memory_gb", "pinned_memory_gb", "hot_gb", "peer_access"}
        if self.in_fleet:
            of_rows |= {"cards", "sharding", "replicate_bytes", "max_memory_gb"}
        if not self.has_rows and (wrong := given & of_rows):
            where = "with --registry only for --local rows" if self.in_fleet else "only for rows in this process"
            raise ValueError(f"{self.labels(wrong)}: {where}; shard nodes have their own.")
        if self.has_rows and self.hot_rows_gb:
            raise ValueError(
                "--hot-rows-gb holds copies of rows that are on shard nodes; here all rows are in this process, "
                "where a copy would save nothing."
            )
        for model, limit_s in self.max_staleness.items():
            if limit_s <= 0:
                raise ValueError(f"--max-staleness {model}={limit_s:g}: seconds must be a number above 0.")
            if self.models and model not in self.models:
                allowed = list(self.models)
                raise ValueError(f"--max-staleness {model}={limit_s:g}: {model} is not among the --model: {allowed}.")
        for model in sorted(self.when_stale.keys() - self.max_staleness.keys()):
            allowed = sorted(self.max_staleness)
            raise ValueError(
                f"--when-stale {model}={self.when_stale[model]}: --max-staleness is only given for {allowed}."
            )
        return self


class TrainSettings(Settings):
    """How a shard node trains the rows that it has."""

    train: bool = False
    """Take gradients of workers, and train the rows of the version that is named (docs/training.md)."""
    train_folder: Path | None = setting(None, "FOLDER")
    """Of the log of gradients and of checkpoints, this node's own; what was trained in it before is put back."""
    train_workers: int = setting(1, ge=1, le=1024)
    """How many workers push, numbered from 0."""
    train_consistency: ConsistencyText = setting("bsp", "bsp|ssp:N|asp")
    """bsp: gradients of a step are added up, once all have pushed. ssp:N: applied as they come, and answered once the
    slowest is at most N steps behind. asp: as they come."""
    train_optimizer: Literal["adagrad", "adam", "sgd"] = "adagrad"
    """Of rows; adagrad is row-wise."""
    train_lr: float = setting(0.01, gt=0)
    """Learning rate of the optimizer."""
    train_init_scale: float = setting(0.01, ge=0)
    """Rows of new keys begin with numbers between this and its negative."""
    worker_timeout_s: float = setting(30.0, gt=0)
    """How long others wait for a worker before it has left; it may come back."""
    publish_registry: str | None = setting(None, "URL|FOLDER")
    """With --train: publish rows that were trained to the fleet of this registry, of the version that is live there."""
    publish_rows_s: float = setting(2.0, gt=0)
    """With --publish-registry: every so many seconds."""

    @model_validator(mode="after")
    def _check_training(self) -> Self:
        if self.train and self.train_folder is None:
            raise ValueError("--train needs --train-folder.")
        if self.train and getattr(self, "registry", None) is not None:
            raise ValueError("--train does not go with --registry: it trains the one version that is named.")
        return self


class ShardNodeConfig(
    LogSettings, TraceSettings, RoleSettings, RowSettings, DivisionSettings, MemberSettings, TrainSettings
):
    """What `shardrank shard-node` runs by."""

    advertise: str | None = setting(None, "ADDRESS")
    """With --registry: where routers reach this node. Default: the first address that it listens on."""
    shard: Shard = setting(..., "I/N")
    """Which shard of how many this node serves, counted from 0."""
    listen: tuple[str, ...] = setting(..., "ADDRESS", min_length=1)
    """host:port, or unix:/path of a socket."""
    threads: int | None = setting(None, file_only=True, ge=1, le=256)
    """Threads that pool rows. With GPUs each waits for a batch at a time, and a card takes two at once. Default: 1, or
    4 with memory_budget_gb, which wait for a disk."""
    admin_listen: str | None = setting(None, "HOST:PORT")
    """For operators: /healthz, /readyz, /metrics; over TLS if --listen has it."""

    @model_validator(mode="after")
    def _check_node(self) -> Self:
        if self.tls_cert is not None and self.tls_client_ca is None:
            raise ValueError("--tls-cert needs --tls-client-ca: certificates are all that keeps strangers out here.")
        return self
