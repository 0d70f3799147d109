"""The Grafana dashboard and the alerts ask for metrics, labels and values that processes have, and lead to runbooks."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, get_args

import promql_parser
import pytest
import yaml

import loader.errors
import router.errors
import serving.errors
import shard_node.errors
from serving.api.node_port import NodeMetrics
from serving.observe.calls import STAGES, Outcome
from serving.observe.metrics import BATCH_STAGES, CALL_STAGES, ServingMetrics
from serving.observe.watch import StateCollector
from shard_node.buckets import NodeIdentity
from shard_node.generation import GenerationState
from shard_node.node import ShardNode

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"]
ALERTS = [rule for group in RULES for rule in group["rules"]]
SCRAPED = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
DASHBOARD = json.loads((DEPLOY / "grafana" / "shardrank.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]
VARIABLES = {"$model": ".*", "$__rate_interval": "1m", "$__range": "1h"}
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",)}
ERRORS = {
    error.kind
    for tree in (loader.errors, router.errors, serving.errors, shard_node.errors)
    for error in vars(tree).values()
    if hasattr(error, "kind")
}
VALUES = {
    "job": {job["job_name"] for job in SCRAPED["scrape_configs"]},
    "kind": ERRORS | {"late"},
    "status": ERRORS | {"ok"},
    "outcome": set(get_args(Outcome)),
    "state": set(get_args(GenerationState)),
    "stage": {*STAGES, *CALL_STAGES, *BATCH_STAGES},
    "method": {"rank"},
    "replica": {"local"},
    "model": {""},
    "found": {"true", "false"},
}


def metric_labels() -> dict[str, set[str]]:
    """Return the labels of every series that processes have, by its name; Prometheus' own are added."""
    node = ShardNode(NodeIdentity(shard_index=0, num_shards=1, num_cards=1, sharding="hash"))
    registries = ServingMetrics()._registry, NodeMetrics(node)._registry
    declared = [
        metric for registry in registries for metric in registry._collector_to_names if hasattr(metric, "_name")
    ]
    labels = {metric._name: metric._labelnames for metric in declared}
    shards = list(StateCollector(lambda: ()).collect())
    labels |= {family.name: family._labelnames for family in shards}
    found = {"up": {"job", "instance"}}
    for family in (*shards, *(family for registry in registries for family in registry.collect())):
        for suffix in SUFFIXES.get(family.type, ()):
            own = {*labels.get(family.name, ()), *(("le",) if suffix == "_bucket" else ())}
            found[family.name + suffix] = own | {"job", "instance"}
    return found


LABELS = metric_labels()


def labels_of(node: Any) -> set[str]:
    """Return the labels of a PromQL expression's result. Fails where it names what no process has."""
    match type(node).__name__:
        case "NumberLiteral":
            return set()
        case "VectorSelector":
            assert node.name in LABELS, node.name
            for matcher in node.matchers.matchers:
                assert matcher.name in LABELS[node.name], f"{node.name} has no label {matcher.name}"
                for value in matcher.value.split("|"):
                    assert any(re.fullmatch(value, known) for known in VALUES[matcher.name]), f"{matcher.name} {value}"
            return LABELS[node.name]
        case "MatrixSelector":
            return labels_of(node.vector_selector)
        case "AggregateExpr":
            labels = labels_of(node.expr)
            kept = labels if node.modifier is None else set(node.modifier.labels)
            assert kept <= labels, f"{sorted(labels)} are not aggregated by {sorted(kept)}"
            return kept
        case "BinaryExpr":
            return labels_of(node.lhs) | labels_of(node.rhs)
        case "Call":
            name, labels = node.func.name, labels_of(node.args[-1])
            if name in ("rate", "increase"):
                assert re.search("_(total|bucket|count|sum)$", node.args[0].vector_selector.name), f"{name} of a gauge"
            assert name != "histogram_quantile" or "le" in labels
            return labels - {"le"} if name == "histogram_quantile" else labels
        case _:
            return labels_of(node.expr)


def result_labels(expression: str) -> set[str]:
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    return labels_of(promql_parser.parse(expression))


@pytest.mark.parametrize(("title", "target"), TARGETS, ids=[target["expr"] for _, target in TARGETS])
def test_every_panel_shows_metrics_that_processes_have(title: str, target: dict[str, str]) -> None:
    # A label that the legend lacks would lay lines of the same name over each other.
    assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) == result_labels(target["expr"]), title


def test_annotations_and_variables_of_the_dashboard_have_values() -> None:
    for annotation in DASHBOARD["annotations"]["list"]:
        assert set(re.findall(r"\{\{(\w+)\}\}", annotation["titleFormat"])) <= result_labels(annotation["expr"])
    queries = [one["query"]["query"] for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]
    assert queries
    for query in queries:
        name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", query).groups()
        assert label in LABELS[name]


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_every_alert_asks_for_what_processes_have_and_has_a_runbook(alert: dict[str, Any]) -> None:
    notes = alert["annotations"]
    assert set(re.findall(r"\$labels\.(\w+)", notes["summary"])) <= result_labels(alert["expr"])
    page, _, anchor = notes["runbook"].partition("#")
    headings = re.findall(r"^#+ (.*)$", (DEPLOY.parent / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert anchor in {re.sub(r"[^a-z0-9 -]", "", one.lower()).replace(" ", "-") for one in headings}


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("rate(shardrank_request_total[5m])", "shardrank_request_total"),
        ('shardrank_live_version{models="films"}', "no label models"),
        ('shardrank_requests_total{status="overlaoded"}', "status overlaoded"),
        ("sum by (version) (shardrank_live_version)", "not aggregated by"),
        ("rate(shardrank_live_version[5m])", "rate of a gauge"),
    ],
)
def test_an_expression_with_a_mistake_is_found(expression: str, problem: str) -> None:
    with pytest.raises(AssertionError, match=problem):
        result_labels(expression)


def test_a_panel_says_what_it_shows() -> None:
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows[:5] == ["Fleet", "Latency", "Versions", "Shards", "Tiers"]
    headings = re.findall(r"^### (.*)$", (DEPLOY / "RUNBOOK.md").read_text(encoding="utf-8"), re.MULTILINE)
    for panel in PANELS:
        assert panel["type"] in {"timeseries", "heatmap"}
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        for named in re.findall(r"Runbook: (.*)\.$", panel["description"]):
            assert set(named.split(", ")) <= set(headings)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    for found in ([panel["id"] for panel in DASHBOARD["panels"]], places):
        assert len(set(found)) == len(found)


def test_alerts_are_named_once_and_the_scrape_configuration_reads_them() -> None:
    names = [alert["alert"] for alert in ALERTS]
    assert len(set(names)) == len(names)
    assert {alert["labels"]["severity"] for alert in ALERTS} <= {"info", "warning", "critical"}
    assert [(DEPLOY / "prometheus" / one).is_file() for one in SCRAPED["rule_files"]] == [True]


def test_promtool_accepts_the_rules() -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed")
    subprocess.run([promtool, "check", "rules", str(DEPLOY / "prometheus" / "alerts.yaml")], check=True)
