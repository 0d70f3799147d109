"""Settings by each road: a flag beats a variable, which beats the file of `--config`, which beats the default."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import pytest

from serving.cli.fleet import coordinator, serve, shard_node, up
from serving.config import DEFAULT_PINNED_GB, DEFAULT_REPLICATE_BYTES, ServeConfig
from serving.embedded import ModelSource
from serving.fleet.config import FleetConfig
from serving.fleet.supervisor import configured_command
from serving.settings import Settings, plain_type
from shard_node.cuda.card_set import CardOptions
from shardrank_testing.command_line import blocks, parse_command_line, shardrank
from shardrank_testing.configuration_page import PAGE, page_of

COMMANDS: dict[str, Any] = {command.name: command for command in (serve, shard_node, coordinator, up)}
SETTINGS = [(command, name) for command, found in COMMANDS.items() for name in found.schema.names()]
FLEET = {"registry": "redis://r/0", "store": "m"}
PAIR = {"tls_cert": "c", "tls_key": "k"}
BASE = {"shard-node": {"shard": "0/2", "listen": ["h:1"]}, "coordinator": {}, "serve": {}, "up": {}}
# What else the file has for a setting that goes with others.
NEEDS: list[tuple[str, dict[str, Any]]] = [
    ("node_id advertise stage_cpu_share local max_staleness", FLEET),
    ("when_stale", FLEET | {"max_staleness": {"a": 1.0}}),
    ("max_memory_gb", FLEET | {"local": True}),
    ("registry", {"store": "m"}),
    ("store_cache store_cache_gb store_timeout_s", {"registry": "r", "store": "s3://bucket/m"}),
    ("tls_cert tls_key tls_client_ca tls_role", PAIR | {"tls_client_ca": "ca"}),
    ("node_cert node_key", {"node_ca": "ca", "node_cert": "c", "node_key": "k"}),
    ("serve.hot_rows_gb", {"shards": ["h:1"]}),
    ("train", {"train_folder": "f"}),
]
# In the file, in a variable, and as a flag.
VALUES: list[tuple[str, tuple[Any, Any, Any]]] = [
    ("registry owner device host node_id publish_registry", ("a", "b", "c")),
    ("advertise admin_listen trace_endpoint", ("a:1", "b:1", "c:1")),
    ("store store_cache snapshot record tls_cert tls_key tls_client_ca", (Path("/a"), Path("/b"), Path("/c"))),
    ("node_ca node_cert node_key tokens", (Path("/a"), Path("/b"), Path("/c"))),
    ("up.shards", (2, 3, 4)),
    ("models", (("a",), ("b",), ("c",))),
    ("shards listen", (("a",), ("b", "c"), ("d", "e"))),
    ("shard", ((0, 2), (1, 2), (1, 3))),
    ("tls_role", (("node=u:a",), ("node=u:b", "router=u:c"), ())),
    ("limits", ({"max_queue": 1}, {"max_queue": 2}, {"max_queue": 3})),
    ("replica_policy", ({"failures": 1}, {"failures": 2}, {})),
    ("max_staleness", ({"a": 1.0}, {"a": 2.0}, {"a": 3.0})),
    ("when_stale", ({"a": "refuse"}, {"a": "other-replica"}, {"a": "answer"})),
    ("versions", ({"a": 1}, {"a": 2}, {})),
    ("serve", ({"shutdown_delay_s": 1}, {"shutdown_delay_s": "2"}, {})),
    ("shard_node", ({"threads": 1}, {"threads": "2"}, {})),
    ("coordinator", ({"tick_s": 1}, {"tick_s": "2"}, {})),
    ("verify", (False, True, False)),
    ("train", (True, False, True)),
    ("train_folder", (Path("/a"), Path("/b"), Path("/c"))),
    ("train_consistency", ("asp", "ssp:2", "bsp")),
    ("train_optimizer", ("sgd", "adam", "adagrad")),
    ("trust_exported local access_log", (True, False, True)),
    ("sharding", ("range", "table", "hash")),
    ("dtype", ("float32", "int8", "bfloat16")),
    ("wire_dtype", ("float32", "int8", "auto")),
    ("peer_access", ("required", "auto", "auto")),
    ("trace_protocol", ("http", "grpc", "http")),
    ("log_level", ("debug", "error", "info")),
    ("log_format", ("json", "text", "json")),
    ("log_dir", (Path("/a"), Path("/b"), Path("/c"))),
    ("hot_rows", ("static", "learning", "static")),
    ("plan_file", (Path(__file__), Path(pytest.__file__), Path(click.__file__))),
]


def of(table: list[tuple[str, Any]], command: str, name: str, default: Any) -> Any:
    return next((value for names, value in table if {name, f"{command}.{name}"} & {*names.split()}), default)


def text_of(value: Any) -> str:
    """Return a value as variables and flags have it; items of several are apart by spaces."""
    if isinstance(value, dict):
        return " ".join(f"{key}={item}" for key, item in value.items())
    if isinstance(value, tuple) and value and isinstance(value[0], int):
        return "/".join(map(str, value))
    if isinstance(value, tuple):
        return " ".join("=".join(item) if isinstance(item, tuple) else item for item in value)
    return str(value)


def toml_of(values: Mapping[str, Any]) -> str:
    def written(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key} = {written(item)}" for key, item in value.items()) + "}"
        if isinstance(value, tuple) and value and not isinstance(value[0], str):
            value = text_of(value) if isinstance(value[0], int) else text_of(value).split()
        return json.dumps(str(value) if isinstance(value, Path) else value)

    return "".join(f"{name} = {written(value)}\n" for name, value in values.items())


def flag_of(schema: type[Settings], name: str, value: Any) -> list[str]:
    flag = schema.flag(name)
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    many = plain_type(schema.model_fields[name]) in (tuple, dict)
    return [word for item in (text_of(value).split() if many else [text_of(value)]) for word in (flag, item)]


@pytest.mark.parametrize(("command", "name"), SETTINGS)
def test_a_setting_by_each_road(command: str, name: str, tmp_path: Path) -> None:
    schema, file = COMMANDS[command].schema, tmp_path / "settings.toml"
    numbers = (2, 3, 4) if plain_type(schema.model_fields[name]) is int else (0.25, 0.5, 0.75)
    in_file, in_variable, by_flag = of(VALUES, command, name, numbers)
    needs = of(NEEDS, command, name, {})
    base = BASE[command] | {key: value for key, value in needs.items() if key in schema.names()}
    variable = {f"SHARDRANK_{name.upper()}": text_of(in_variable)}

    def parsed(*words: str, **environment: str) -> Any:
        return parse_command_line([command, "--config", str(file), *words], **environment)[name]

    file.write_text(toml_of(base))
    if name not in base:
        assert parsed() == schema.model_fields[name].default
    file.write_text(toml_of(base | {name: in_file}))
    assert parsed() == in_file
    assert parsed(**variable) == in_variable
    if not schema.is_file_only(name):
        assert parsed(*flag_of(schema, name, by_flag), **variable) == by_flag
    elif flags := flag_of(schema, name, by_flag):
        with pytest.raises(click.NoSuchOption):
            parsed(*flags)


NUMBERS = [
    (command, name)
    for command, name in SETTINGS
    if plain_type(COMMANDS[command].schema.model_fields[name]) in (int, float)
]


@pytest.mark.parametrize(("command", "name"), NUMBERS)
def test_a_number_beyond_its_bounds_is_refused(command: str, name: str, tmp_path: Path) -> None:
    schema, file = COMMANDS[command].schema, tmp_path / "settings.toml"
    rules = schema.model_fields[name].metadata
    beyond = [rule.gt for rule in rules if hasattr(rule, "gt")]
    beyond += [rule.ge - 1 for rule in rules if hasattr(rule, "ge")] + [
        rule.le + 1 for rule in rules if hasattr(rule, "le")
    ]
    assert beyond
    for value in [*beyond, *(["nan", "inf"] if plain_type(schema.model_fields[name]) is float else [1.5])]:
        file.write_text(toml_of(BASE[command]))
        with pytest.raises(click.UsageError, match=f"SHARDRANK_{name.upper()}: Input should|is not a time"):
            parse_command_line([command, "--config", str(file)], **{f"SHARDRANK_{name.upper()}": str(value)})
        if not schema.is_file_only(name):
            with pytest.raises(click.UsageError, match=r"not in the range|is not a|Input should"):
                parse_command_line([command, "--config", str(file), schema.flag(name), str(value)])
        file.write_text(f"{name} = {value}\n{toml_of(BASE[command])}")
        with pytest.raises(click.UsageError, match=f"settings.toml: {name}: Input should"):
            parse_command_line([command, "--config", str(file)])


def test_limits_of_all_roads_are_merged(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text("[limits]\nmax_queue = 1\nmax_candidates = 1\nmax_in_flight = 1\n")
    words = ["serve", "--config", str(tmp_path / "s.toml"), "--limit", "max_candidates=3"]
    found = parse_command_line(words, SHARDRANK_LIMITS="max_candidates=2 max_in_flight=2")
    assert found["limits"] == {"max_queue": 1, "max_in_flight": 2, "max_candidates": 3}


def test_variables_that_are_no_settings_are_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Kubernetes makes `SHARDRANK_GRPC_PORT` of a service's name; settings of other commands are no mistakes."""
    unknown = {"SHARDRANK_GRPC_PORT": "tcp://10.0.0.1:8081", "SHARDRANK_LUNCH": "soup"}
    known = {"SHARDRANK_LISTEN": "h:1", "SHARDRANK_LOG_LEVEL": "info", "SHARDRANK_STORE": ""}
    found = parse_command_line(["serve", "--store", "m"], **unknown, **known)
    assert (found["grpc_port"], found["store"]) == (8081, Path("m"))
    assert "ignored, no setting: SHARDRANK_GRPC_PORT, SHARDRANK_LUNCH" in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_printed_settings_are_those_of_a_file(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without passwords, and with the defaults; `serve` alone prints what it would run by."""
    (tmp_path / "s.toml").write_text(toml_of(BASE[command]))
    words = [command, "--config", str(tmp_path / "s.toml")]
    (tmp_path / "printed.toml").write_text(shardrank(*words, "--print-config").output)
    assert parse_command_line([command, "--config", str(tmp_path / "printed.toml")]) == parse_command_line(words)
    monkeypatch.setenv("SHARDRANK_REGISTRY", "redis://:secret@h/0")
    monkeypatch.setenv("SHARDRANK_STORE", "m")
    printed = shardrank(*words, "--print-config").output
    assert 'registry = "redis://***@h/0"' in printed
    assert "secret" not in printed


def test_children_of_a_fleet_have_files_that_nobody_else_reads(tmp_path: Path) -> None:
    config = FleetConfig(
        registry="redis://:secret@h/0",
        store=Path("m"),
        models=("films",),
        limits={"max_queue": 3},
        serve={"shutdown_delay_s": 5},
        shard_node={"threads": 2},
        replicas=2,
        processes={"shard-1-1": {"threads": 3, "listen": ["127.0.0.1:1"]}},
    )
    assert config.shard_node_config("shard-1-1", "unix:/n.sock").listen == ("127.0.0.1:1",)
    worker, node = config.serve_config("serve-0"), config.shard_node_config("shard-1-0", "unix:/n.sock")
    assert (worker.limits, worker.shutdown_delay_s, worker.workers) == ({"max_queue": 3}, 5, 1)
    assert (node.threads, node.shard, node.listen) == (2, (1, 2), ("unix:/n.sock",))
    for command, child in (("serve", worker), ("shard-node", node), ("coordinator", config.coordinator_config("me"))):
        *_, name, option, file = configured_command(command, child, tmp_path / command)
        words = [name, option, file]
        assert "secret" not in " ".join(words)
        assert stat.S_IMODE((tmp_path / command).stat().st_mode) == 0o600
        found = parse_command_line(words)
        assert found == dict(child) | {"store": child.store and child.store.absolute()}


def test_defaults_that_are_repeated_are_those_of_the_router_and_the_engine() -> None:
    assert ModelSource(snapshot=Path("x")).replicate_bytes == DEFAULT_REPLICATE_BYTES
    assert CardOptions().pinned_memory_gb == DEFAULT_PINNED_GB


def test_the_page_has_every_setting_of_this_release() -> None:
    assert PAGE.read_text(encoding="utf-8") == page_of(PAGE.read_text(encoding="utf-8"))
    for block in blocks(PAGE.read_text(encoding="utf-8"), "toml"):
        assert tomllib.loads(block).keys() <= set(COMMANDS["serve"].schema.names())


def test_a_child_takes_what_a_variable_gave_its_supervisor(tmp_path):
    """A variable may name what goes with a registry where there is none; the file of a child has it as well."""
    config = parse_command_line(["serve", "--store", str(tmp_path)], SHARDRANK_NODE_ID="a")
    assert config["node_id"] == "a"
    file = tmp_path / "serve-0.toml"
    ServeConfig.model_validate({"store": tmp_path, "node_id": "a"}, context={"given": set()}).write(file)
    command = ("serve", "--config", file, "--print-config")
    assert "--node-id: only with --registry" in shardrank(*command, code=None).output
    # In a process of its own: it ends with its parent.
    environment = os.environ | {"SHARDRANK_PARENT_PID": str(os.getpid())}
    words = [sys.executable, "-m", "serving.cli", *map(str, command)]
    printed = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout
    assert tomllib.loads(printed)["node_id"] == "a"


def test_a_variable_of_another_store_harms_no_command(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDRANK_STORE_CACHE", str(tmp_path / "cache"))
    refused = shardrank("inspect", "--store", tmp_path, code=None).output
    assert "store-cache" not in refused
    assert "document" not in refused
    flag = shardrank("inspect", "--store", tmp_path, "--store-cache", tmp_path, code=None).output
    assert "Error: --store-cache: only with a --store at a URL." in flag


def test_settings_of_children_are_printed_without_passwords():
    config = FleetConfig(store="m", serve={"trace_endpoint": "http://u:secret@h:4317"})
    assert "secret" in config.to_toml()
    assert "secret" not in config.to_toml(masked=True)


@pytest.mark.parametrize(
    ("section", "name"),
    [("coordinator", "owner"), ("shard_node", "node_id"), ("serve", "workers"), ("serve", "http_port")],
)
def test_what_a_fleet_sets_for_each_process_is_no_setting_of_all(section, name):
    with pytest.raises(ValueError, match=rf"{section}\.{name}: the fleet sets it"):
        FleetConfig(store="m", **{section: {name: "x"}})
