"""Dockerfile, compose file and systemd units: what can be checked of them without an engine for containers."""

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from loader.registry.redis_registry import parse_redis_url
from serving.server import DRAIN_TIMEOUT_S
from shardrank_testing.command_line import parse_command_line

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
TOOLS = {"publish", "rollout"}
SETTINGS = {"STORE": "/srv/models", "SHARD": "0/2", "LISTEN": "0.0.0.0:7000", "ADVERTISE": "10.0.0.7:7000"}
SETTINGS |= {"NODE_FLAGS": "", "SERVE_FLAGS": "--workers 2"}


def dockerfile() -> dict[str, list[str]]:
    """Return the instructions of each stage by its name, those of the stage that it begins with first."""
    text = re.sub(r"\\\n\s*", " ", (DEPLOY / "docker" / "Dockerfile").read_text())
    stages: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("FROM "):
            _, base, _, name = line.split()
            stages[name] = [*stages.get(base, [])]
        elif line and line[0] != "#" and stages:
            stages[name].append(line)
    return stages


def compose() -> dict:
    return yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())


def test_the_image_has_every_package_and_nothing_that_is_not_there():
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    lines = [line for stage in dockerfile().values() for line in stage if line.startswith("COPY ")]
    sources = {source for line in lines if "--from" not in line for source in line.split()[1:-1]}
    assert {*wheel["packages"], *wheel["force-include"]} <= sources
    assert all((ROOT / source).exists() for source in sources)
    ignored = (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text()
    assert sources == set(re.findall("^!(.*)$", ignored, re.MULTILINE))


def test_both_targets_run_as_a_user_that_is_not_root():
    for target in ("cpu", "cuda"):
        stage = dockerfile()[target]
        assert [line for line in stage if line.startswith("USER ")] == ["USER 10001:10001"]
        assert 'ENTRYPOINT ["shardrank"]' in stage


def test_only_the_cuda_image_has_cupy_and_a_folder_that_it_can_write():
    assert any(one.startswith("cupy-cuda13x") for one in PROJECT["project"]["optional-dependencies"]["cuda"])
    stages = {name: "\n".join(stage) for name, stage in dockerfile().items()}
    assert "'.[cuda,otel,stores]'" in stages["build-cuda"]
    assert "'.[otel,stores]'" in stages["build-cpu"]
    assert "ENV CUPY_CACHE_DIR=/tmp/" in stages["cuda"]
    # The compose file and the pods give every container a /tmp, and nothing else that it can write.
    assert "/tmp" in compose()["x-shardrank"]["tmpfs"]


@pytest.mark.parametrize("name", ["shardrank-serve.service", "shardrank-shard-node@.service"])
def test_a_unit_that_may_hold_rows_waits_and_has_a_cache(name):
    text = (DEPLOY / "systemd" / name).read_text()
    (folder,) = re.findall(r"^CacheDirectory=(.*)$", text, re.MULTILINE)
    assert f"Environment=CUPY_CACHE_DIR=%C/{folder}/" in text
    # It is ready once it has loaded, however long that takes.
    assert "\nType=notify\nTimeoutStartSec=infinity\n" in text


def test_every_service_of_the_compose_file_is_a_command_of_this_release():
    services = compose()["services"]
    parsed = {
        name: parse_command_line(one["command"], **one["environment"])
        for name, one in services.items()
        if name not in TOOLS | {"redis"}
    }
    assert sorted(parsed) == ["coordinator", "serve-0", "serve-1", "shard-0-0", "shard-0-1", "shard-1-0", "shard-1-1"]
    assert [parsed[f"shard-{shard}-{replica}"]["shard"] for shard in (0, 1) for replica in (0, 1)] == [
        (0, 2), (0, 2), (1, 2), (1, 2),
    ]  # fmt: skip
    for name, one in parsed.items():
        if name != "coordinator":
            port = one["http_port"] if name.startswith("serve-") else one["admin_listen"].rpartition(":")[2]
            assert f"http://127.0.0.1:{port}/readyz" in services[name]["healthcheck"]["test"][-1]
            assert services[name]["healthcheck"]["start_period"] == services["serve-0"]["healthcheck"]["start_period"]
        if name.startswith("shard-"):
            assert one["advertise"] == f"{services[name]['hostname']}:7000"
        if name.startswith("serve-"):
            grace_s = int(services[name]["stop_grace_period"].removesuffix("s"))
            assert one["shutdown_delay_s"] + DRAIN_TIMEOUT_S < grace_s


def test_the_compose_file_keeps_ports_and_the_password_of_redis_in(tmp_path):
    """Ports are published on loopback; every container reads the password from a file, and none has it in settings."""
    services, text = compose()["services"].values(), (DEPLOY / "docker" / "compose.yaml").read_text()
    assert {port.partition(":")[0] for one in services for port in one.get("ports", ())} == {"127.0.0.1"}
    assert [one["secrets"] for one in services] == [["redis-password"]] * len(services)
    assert not re.search(r"REDIS_PASSWORD\b", text)
    (tmp_path / "password").write_text("hidden\n")
    url = compose()["x-shardrank"]["environment"]["SHARDRANK_REGISTRY"]
    here = url.replace("/run/secrets/redis-password", str(tmp_path / "password"))
    assert parse_redis_url(here).connection["password"] == "hidden"


def test_images_and_actions_are_of_one_version():
    """Images by a full tag, but for ours where kustomize sets it; actions by the commit of the tag beside it."""
    files = [*DEPLOY.rglob("*.yaml"), DEPLOY / "docker" / "Dockerfile"]
    lines = [line for path in files for line in path.read_text().splitlines()]
    images = [line for line in lines if re.match(r" *(- )?image: |ARG PYTHON_IMAGE=|# syntax=", line)]
    assert {line.split()[-1] for line in images if not re.search(r":\d+\.\d+\.\d+", line)} == {"shardrank"}
    workflows = "".join(path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml"))
    uses = re.findall(r"uses: (.*)", workflows)
    assert [one for one in uses if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", one)] == []


def test_the_tools_of_the_compose_file_are_commands_of_this_release(tmp_path):
    parse_command_line([*compose()["services"]["publish"]["entrypoint"][1:], str(tmp_path), "--store", "/models"])
    parse_command_line([*compose()["services"]["rollout"]["entrypoint"][1:], "start", "films", "3"])


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_a_unit_starts_a_command_of_this_release(unit):
    (line,) = re.findall(r"^ExecStart=(.*)$", unit.read_text(), re.MULTILINE)
    filled = (
        re.sub(r"\$\{?([A-Z_]+)\}?", lambda found: SETTINGS[found[1]], line).replace("%H", "host").replace("%i", "x")
    )
    program, *arguments = shlex.split(filled)
    assert program == "/opt/shardrank/bin/shardrank"
    parse_command_line(arguments, SHARDRANK_REGISTRY="redis://redis.internal/0")


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_finds_nothing_wrong_with_a_unit(unit, tmp_path):
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not installed")
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace("/opt/shardrank/bin/shardrank", "/bin/true"))
    done = subprocess.run([analyze, "verify", str(copy)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_examples_of_settings_name_what_the_units_use():
    examples = [(DEPLOY / "systemd" / name).read_text() for name in ("fleet.env.example", "shard-0.env.example")]
    given = {name for text in examples for name in re.findall("^([A-Z_]+)=", text, re.MULTILINE)}
    used = {name for unit in UNITS for name in re.findall(r"\$\{?([A-Z_]+)\}?", unit.read_text())}
    assert used <= given
