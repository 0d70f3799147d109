"""The fleet of deploy/README.md, run line by line: it serves, and tells what the dashboard and the alerts ask for."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
import yaml

from serving.training.trainer import train_version
from shardrank_testing.command_line import commands
from shardrank_testing.deployment import DEPLOY
from shardrank_testing.movielens import small_interactions
from shardrank_testing.processes import Program, running
from shardrank_testing.promql import ExpressionError, Reader, Series, told_series

ALERTS = [
    rule
    for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
SCRAPED = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
JOBS = [one["job_name"] for one in SCRAPED["scrape_configs"]]
DASHBOARD = json.loads((DEPLOY / "grafana" / "shardrank.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
REQUEST = {
    "context": {"sparse": {"user_id": [1], "history": [2, 3]}},
    "candidates": {"sparse": {"film_id": [4, 5], "genre": [[1], [2]]}},
    # Whatever else this machine does meanwhile.
    "timeout_ms": 10_000,
}


def free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


class Fleet:
    """The answer of its first request, each process' metrics after it, and its serving process."""

    def __init__(self, url: str, admin_ports: list[int], serve: Program) -> None:
        self.serve = serve
        self.answer = httpx.post(f"{url}/v1/models/films:rank", json=REQUEST, timeout=20)
        self.metrics = [httpx.get(f"{url}/metrics").text]
        self.metrics += [httpx.get(f"http://127.0.0.1:{port}/metrics").text for port in admin_ports]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    for _ in range(3):
        version = train_version(small_interactions(num_ratings=2000), folder / "models", seed=0, epochs=1)
    assert version.folder.name == "3"
    ports = dict(zip(("7000", "7001", "7002"), map(str, free_ports(3)), strict=True))
    page = (DEPLOY / "README.md").read_text(encoding="utf-8")
    *processes, publish, rollout = [
        [re.sub(r"700[0-2]", lambda port: ports[port[0]], part) for part in command[1:]] for command in commands(page)
    ]
    # Not the fixed ports of a real fleet, nor all interfaces.
    http_port, grpc_port, *admin_ports = free_ports(5)
    nodes = [command for command in processes if command[0] == "shard-node"]
    for node, port in zip(nodes, admin_ports, strict=True):
        node += ["--admin-listen", f"127.0.0.1:{port}"]
    (serve,) = [command for command in processes if command[0] == "serve"]
    serve[serve.index("--host") + 1] = "127.0.0.1"
    serve += ["--http-port", str(http_port), "--grpc-port", str(grpc_port)]
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.chdir(folder)
        patch.setenv("SHARDRANK_REGISTRY", str(folder / "registry"))
        programs = {command[0]: stack.enter_context(running(*command)) for command in processes}
        for command in (publish, rollout):
            subprocess.run([sys.executable, "-m", "serving.cli", *command], check=True, timeout=240)
        yield Fleet(f"http://127.0.0.1:{http_port}", admin_ports, programs["serve"])


@pytest.fixture(scope="module")
def series(fleet: Fleet) -> dict[str, Series]:
    return told_series(fleet.metrics)


@pytest.fixture(scope="module")
def reader(series: dict[str, Series]) -> Reader:
    return Reader(series, JOBS)


def test_the_fleet_of_the_deploy_page_serves(fleet: Fleet) -> None:
    assert fleet.answer.status_code == 200
    assert fleet.answer.json()["version"] == 3


def test_nodes_tell_of_their_rows_and_lookups_what_serving_processes_tell_of_them(fleet: Fleet) -> None:
    def rows(text: str) -> set[str]:
        return set(re.findall(r"^(shardrank_(?:memory_bytes|rows_looked_up_total)\{.*)$", text, re.MULTILINE))

    serving, *nodes = map(rows, fleet.metrics)
    assert all(nodes)
    # The two replicas of shard 0 took turns: what they counted is told by the one that was asked.
    assert serving == set.union(*nodes)
    counts = [int(one) for text in fleet.metrics for one in re.findall(r"node_request_seconds_count\S+ (\d+)", text)]
    assert len(counts) == 3 - counts.count(0)
    assert sum(counts) >= 2


def test_every_panel_asks_for_what_the_fleet_tells(reader: Reader) -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            labels = reader.read(target["expr"])
            named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert named <= labels, panel["title"]
            # Else lines of the same name lie over each other.
            assert labels <= named, panel["title"]
    for one in DASHBOARD["annotations"]["list"]:
        assert set(re.findall(r"\{\{(\w+)\}\}", one["titleFormat"])) <= reader.read(one["expr"])


def test_every_variable_of_the_dashboard_has_values(series: dict[str, Series]) -> None:
    asked = [one["query"]["query"] for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]
    assert asked
    for query in asked:
        name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", query).groups()
        assert series[name].seen[label]


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_every_alert_asks_for_what_the_fleet_tells_and_has_a_runbook(alert: dict[str, Any], reader: Reader) -> None:
    labels = reader.read(alert["expr"])
    notes = alert["annotations"]
    assert set(re.findall(r"\$labels\.(\w+)", notes["summary"])) <= labels
    page, _, anchor = notes["runbook"].partition("#")
    headings = re.findall(r"^#+ (.*)$", (DEPLOY.parent / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert anchor in {re.sub(r"[^a-z0-9 -]", "", one.lower()).replace(" ", "-") for one in headings}


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("rate(shardrank_request_total[5m])", "no process tells shardrank_request_total"),
        ("shardrank_requests", "no process tells shardrank_requests"),
        ('shardrank_live_version{models="films"}', "no label models"),
        ('shardrank_requests_total{status="overlaoded"}', "never 'overlaoded'"),
        ('shardrank_live_version{model="shop"}', "never 'shop'; it is one of ..films.."),
        ('up{job="shardrank"}', "never 'shardrank'"),
        ("sum by (version) (shardrank_live_version)", r"has no \['version'\]"),
        ("rate(shardrank_live_version[5m])", "which is a gauge"),
        ("histogram_quantile(0.9, sum by (model) (rate(shardrank_stage_seconds_bucket[5m])))", "without le"),
        ("sum by (model) (shardrank_degraded) / sum by (instance) (shardrank_degraded)", "gives nothing"),
        ("up unless on (model) shardrank_live_version", "unless on"),
    ],
)
def test_an_expression_with_a_mistake_is_found(reader: Reader, expression: str, message: str) -> None:
    with pytest.raises(ExpressionError, match=message):
        reader.read(expression)


def test_a_panel_says_what_it_shows() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows[:5] == ["Fleet", "Latency", "Versions", "Shards", "Tiers"]
    for panel in PANELS:
        assert panel["type"] in {"timeseries", "heatmap"}
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)


def test_what_a_description_calls_a_runbook_section_is_one() -> None:
    headings = re.findall(r"^### (.*)$", (DEPLOY / "RUNBOOK.md").read_text(encoding="utf-8"), re.MULTILINE)
    for panel in PANELS:
        for named in re.findall(r"Runbook: (.*)\.$", panel["description"]):
            assert set(named.split(", ")) <= set(headings)


def test_alerts_are_named_once_and_the_scrape_configuration_reads_them() -> None:
    names = [alert["alert"] for alert in ALERTS]
    assert len(set(names)) == len(names)
    assert {alert["labels"]["severity"] for alert in ALERTS} <= {"info", "warning", "critical"}
    assert [(DEPLOY / "prometheus" / one).is_file() for one in SCRAPED["rule_files"]] == [True]


def test_promtool_takes_the_rules() -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed")
    subprocess.run([promtool, "check", "rules", str(DEPLOY / "prometheus" / "alerts.yaml")], check=True)


def test_the_serving_process_ends_in_order(fleet: Fleet) -> None:
    # The last test of this fleet.
    assert fleet.serve.stop() == 0
