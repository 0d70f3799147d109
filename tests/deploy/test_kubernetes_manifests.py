"""The manifests of Kubernetes and KServe fit their schemas, and what they name is there: commands, ports, metrics."""

from __future__ import annotations

import copy
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from serving.observe.calls import BatchTimes, Call
from serving.observe.metrics import ServingMetrics
from serving.server import DRAIN_TIMEOUT_S
from shardrank_testing.command_line import parse_command_line

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
BASE = DEPLOY / "kubernetes" / "base"
# What the pods have from a secret; the name is of the pod.
VARIABLES = {"SHARDRANK_REGISTRY": "redis://redis/0", "SHARDRANK_NODE_ID": "shard-0-0"}
# Kinds of operators, which Kubernetes has no schemas of.
CUSTOM_GROUPS = ("monitoring.coreos.com/",)


def base_documents() -> list[dict[str, Any]]:
    """Every object of the base as it stands in the files, without kustomize."""
    names = yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
    return [one for name in names for one in yaml.safe_load_all((BASE / name).read_text())]


def rendered(overlay: str | Path) -> list[dict[str, Any]]:
    """Return every object of an overlay as `kubectl kustomize` renders it. Skips where kubectl is not installed."""
    if (kubectl := shutil.which("kubectl")) is None:
        pytest.skip("kubectl is not installed")
    command = [kubectl, "kustomize", str(DEPLOY / "kubernetes" / "overlays" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return list(yaml.safe_load_all(done.stdout))


def pods(documents: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, pod template) of each workload."""
    for one in documents:
        if one["kind"] in ("Deployment", "StatefulSet"):
            yield one["metadata"]["name"], one["spec"]["template"]


@pytest.mark.parametrize("version", ["1.31.0", kubernetes_validate.latest_version()])
@pytest.mark.parametrize("overlay", [None, "cpu", "cuda"])
def test_every_object_fits_the_schemas_of_kubernetes(overlay, version):
    found = base_documents() if overlay is None else rendered(overlay)
    checked = [one for one in found if not one["apiVersion"].startswith(CUSTOM_GROUPS)]
    assert len(checked) == len(found) - 2
    for one in checked:
        kubernetes_validate.validate(one, version, strict=True)
        assert one["metadata"].get("namespace", "shardrank") == "shardrank"


def test_every_file_of_the_base_is_listed():
    listed = set(yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"])
    assert {path.name for path in BASE.glob("*.yaml")} - {"kustomization.yaml"} == listed


def test_the_commands_in_the_pods_are_commands_of_this_release():
    commands = {}
    for name, pod in pods(base_documents()):
        container = pod["spec"]["containers"][0]
        if container["image"] == "shardrank":
            commands[name] = parse_command_line(container["args"], **VARIABLES)
    assert set(commands) == {"shard-0", "shard-1", "serving", "coordinator"}
    assert (commands["shard-0"]["shard"], commands["shard-1"]["shard"]) == ((0, 2), (1, 2))
    assert commands["serving"]["http_port"] == 8080


def test_the_cuda_overlay_gives_each_shard_node_gpus_and_as_many_cards():
    for name, pod in pods(rendered("cuda")):
        container = pod["spec"]["containers"][0]
        if name.startswith("shard-"):
            gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
            command = parse_command_line(container["args"], **VARIABLES)
            assert command["cards"] == gpus == 8
            # Not `auto`: a pod whose GPUs can't be used must not hold the rows of eight in its RAM.
            assert command["device"] == "cuda"
            assert command["pinned_memory_gb"] * 1e9 < int(container["resources"]["limits"]["memory"][:-2]) << 30
        else:
            assert "nvidia.com/gpu" not in container["resources"]["limits"]


def test_certificates_of_the_wire_have_the_role_of_their_pods(tmp_path):
    """And nodes' names are those that they advertise."""
    folder = os.path.relpath(BASE.parent, tmp_path)
    parts = {"resources": [f"{folder}/base"], "components": [f"{folder}/wire-tls"]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(parts))
    found = rendered(tmp_path)
    issued = {one["spec"]["secretName"]: one["spec"] for one in found if one["kind"] == "Certificate"}
    roles = {}
    for name, pod in pods(found):
        for secret in (one["secret"]["secretName"] for one in pod["spec"].get("volumes", ()) if "secret" in one):
            arguments = pod["spec"]["containers"][0]["args"]
            assert {text.partition("=/tls/")[2] for text in arguments} == {"", "ca.crt", "tls.crt", "tls.key"}
            if (address := parse_command_line(arguments, **VARIABLES).get("advertise")) is not None:
                pattern = "*." + address.partition(".")[2].rpartition(":")[0]
                assert {pattern, name} <= set(issued[secret]["dnsNames"])
            roles[name] = issued[secret]["uris"]
    assert roles == {"shard-0": ["shardrank:node"], "shard-1": ["shardrank:node"], "serving": ["shardrank:router"]}
    (monitor,) = (one for one in found if one["kind"] == "PodMonitor")
    (port,) = monitor["spec"]["podMetricsEndpoints"]
    assert issued[port["tlsConfig"]["cert"]["secret"]["name"]]["uris"] == ["shardrank:operator"]
    assert port["tlsConfig"]["serverName"] in issued["wire-node"]["dnsNames"]


def test_pods_have_no_variables_of_services():
    """`SHARDRANK_GRPC_PORT` of the service shardrank-grpc is the name of a setting."""
    for name, pod in pods(base_documents()):
        if pod["spec"]["containers"][0]["image"] == "shardrank":
            assert pod["spec"]["enableServiceLinks"] is False, name


def test_selectors_choose_the_pods_that_they_are_for():
    found = base_documents()
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(found)}

    def chosen(selector: dict[str, str]) -> list[str]:
        return [name for name, own in labels.items() if selector.items() <= own.items()]

    services = {one["metadata"]["name"]: chosen(one["spec"]["selector"]) for one in found if one["kind"] == "Service"}
    assert services == {
        "redis": ["redis"], "shard-0": ["shard-0"], "shard-1": ["shard-1"],
        "shardrank": ["serving"], "shardrank-grpc": ["serving"],
    }  # fmt: skip
    budgets = {
        one["metadata"]["name"]: chosen(one["spec"]["selector"]["matchLabels"])
        for one in found
        if one["kind"] == "PodDisruptionBudget"
    }
    assert budgets == {"shard-0": ["shard-0"], "shard-1": ["shard-1"], "serving": ["serving"]}
    for one in found:
        if one["kind"] in ("Deployment", "StatefulSet"):
            assert chosen(one["spec"]["selector"]["matchLabels"]) == [one["metadata"]["name"]]
        if one["kind"] == "NetworkPolicy" and one["spec"]["podSelector"]:
            assert chosen(one["spec"]["podSelector"]["matchLabels"])


def ports_of(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return pod["spec"]["containers"][0].get("ports", [])


def test_ports_that_are_named_are_ports_of_the_pods():
    found = base_documents()
    ports = {name: {port["name"] for port in ports_of(pod)} for name, pod in pods(found)}
    assert ports["serving"] == {"http", "grpc"}
    assert ports["shard-0"] == ports["shard-1"] == {"wire", "metrics"}
    for name, pod in pods(found):
        container = pod["spec"]["containers"][0]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = container.get(probe, {})
            for kind in ("httpGet", "tcpSocket"):
                if kind in asked:
                    assert asked[kind]["port"] in ports[name]


def test_prometheus_finds_its_ports_under_the_names_of_jobs_that_alerts_go_by():
    found = base_documents()
    by_name = {port["name"]: port["containerPort"] for _, pod in pods(found) for port in ports_of(pod)}
    jobs = []
    for one in found:
        if one["apiVersion"].startswith(CUSTOM_GROUPS):
            (endpoint,) = one["spec"].get("endpoints") or one["spec"]["podMetricsEndpoints"]
            assert by_name[endpoint["port"]] in (8080, 9100)
            jobs += [rule["replacement"] for rule in endpoint["relabelings"] if rule["targetLabel"] == "job"]
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())["scrape_configs"]
    assert jobs == [one["job_name"] for one in scraped]


def container_of(name: str) -> dict[str, Any]:
    (pod,) = [pod for found, pod in pods(base_documents()) if found == name]
    return pod["spec"]["containers"][0] | {"grace_s": pod["spec"].get("terminationGracePeriodSeconds")}


def test_probes_ask_the_endpoints_that_are_meant_for_it():
    # A pod that loads must not be killed for it: liveness never asks whether a model is there.
    asked = {"serving": ["/readyz", "/readyz", "/healthz"], "shard-0": ["/healthz", "/readyz", "/healthz"]}
    for name, paths in (asked | {"shard-1": asked["shard-0"]}).items():
        container = container_of(name)
        probes = ("startupProbe", "readinessProbe", "livenessProbe")
        assert [container[probe]["httpGet"]["path"] for probe in probes] == paths


def test_the_grace_of_a_serving_pod_covers_all_that_happens_at_its_end():
    container = container_of("serving")
    pre_stop_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    delay_s = parse_command_line(container["args"])["shutdown_delay_s"]
    assert pre_stop_s + delay_s + DRAIN_TIMEOUT_S < container["grace_s"]


def test_no_pod_runs_as_root_or_may_write_its_own_image():
    for _, pod in pods(base_documents()):
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        for container in pod["spec"]["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_autoscaler_reads_a_metric_that_the_rule_makes_of_one_that_exists():
    scaler = next(one for one in base_documents() if one["kind"] == "HorizontalPodAutoscaler")
    (metric,) = scaler["spec"]["metrics"]
    (rule,) = yaml.safe_load((DEPLOY / "kubernetes" / "prometheus-adapter-rule.yaml").read_text())["rules"]["custom"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    metrics = ServingMetrics()
    call = Call(
        "http", "rank", 1.0, "films", received_at=1.0, leased_at=1.0, parsed_at=1.0, queue_s=0.001, encoded_at=1.01
    )
    call.batch = BatchTimes(ended_at=1.005)
    metrics.call_ended(call, "ok", None, 1.01)
    text = metrics.render().decode()
    for series in ("shardrank_stage_seconds_sum", "shardrank_stage_seconds_count"):
        assert series in rule["metricsQuery"]
        assert any(line.startswith(series) and 'stage="queue"' in line for line in text.splitlines())


def test_redis_keeps_everything_and_evicts_nothing():
    container = container_of("redis")
    words = shlex.split(container["command"][2])
    assert words[words.index("--appendonly") + 1] == "yes"
    assert words[words.index("--maxmemory-policy") + 1] == "noeviction"
    assert (words[words.index("--maxmemory") + 1], container["resources"]["limits"]["memory"]) == ("3gb", "4Gi")


KSERVE = DEPLOY / "kubernetes" / "kserve"
# Written from the API's reference: no package has KServe's definitions without all that it runs on.
SCHEMAS = json.loads((Path(__file__).parent / "kserve_schemas.json").read_text())
RUNTIME = yaml.safe_load((KSERVE / "cluster-serving-runtime.yaml").read_text())
SERVICES = list(yaml.safe_load_all((KSERVE / "inference-service.yaml").read_text()))
OF_MODELS = {"modelFormat", "protocolVersion", "runtime", "runtimeVersion", "storageUri"}


def pod_of(service: dict[str, Any]) -> dict[str, Any]:
    """The pod that KServe makes: the service's fields over the container's, its args after the container's."""
    predictor = service["spec"]["predictor"]
    (container,) = copy.deepcopy(RUNTIME["spec"]["containers"])
    own = {name: value for name, value in predictor["model"].items() if name not in OF_MODELS}
    container |= own | {"args": container["args"] + own.get("args", [])}
    container["volumeMounts"] += [{"name": "store", "mountPath": "/mnt/models", "readOnly": True}]
    claim = {"name": "store", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}}
    spec = {"containers": [container], "volumes": [*RUNTIME["spec"]["volumes"], claim]}
    spec |= {name: predictor[name] for name in ("terminationGracePeriodSeconds", "enableServiceLinks")}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": service["metadata"]["name"]}, "spec": spec}


def test_every_object_fits_its_schema():
    for one in (RUNTIME, *SERVICES):
        jsonschema.validate(one, SCHEMAS[one["kind"]])
    for service in SERVICES:
        for version in ("1.31.0", kubernetes_validate.latest_version()):
            kubernetes_validate.validate(pod_of(service), version, strict=True)


@pytest.mark.parametrize("service", SERVICES, ids=lambda one: one["metadata"]["name"])
def test_a_service_asks_for_what_the_runtime_has(service):
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == RUNTIME["metadata"]["name"]
    assert model["protocolVersion"] in RUNTIME["spec"]["protocolVersions"]
    formats = [(one["name"], one["version"]) for one in RUNTIME["spec"]["supportedModelFormats"]]
    assert (model["modelFormat"]["name"], model["modelFormat"]["version"]) in formats


@pytest.mark.parametrize("service", SERVICES, ids=lambda one: one["metadata"]["name"])
def test_its_pod_runs_a_command_of_this_release_at_the_ports_that_kserve_leads_to(service):
    pod = pod_of(service)["spec"]
    (container,) = pod["containers"]
    # KServe looks for it by this name.
    assert container["name"] == "kserve-container"
    command = parse_command_line(container["args"])
    assert (str(command["store"]), command["models"], command["version"]) == ("/mnt/models", ("films",), 3)
    (port,) = container["ports"]
    protocol = service["spec"]["predictor"]["model"]["protocolVersion"]
    expected = {"v2": ("http1", command["http_port"]), "grpc-v2": ("h2c", command["grpc_port"])}
    assert (port["name"], port["containerPort"]) == expected[protocol]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == command["http_port"]
    assert RUNTIME["spec"]["annotations"]["prometheus.kserve.io/port"] == str(command["http_port"])
    pre_stop_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    needed_s = pre_stop_s + command["shutdown_delay_s"] + DRAIN_TIMEOUT_S
    assert needed_s < pod["terminationGracePeriodSeconds"]
