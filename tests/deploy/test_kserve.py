"""shardrank as a runtime of KServe: the objects fit its schemas, and give pods that run commands of this release."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from serving.server import ServerConfig
from shardrank_testing.command_line import parse_command_line
from shardrank_testing.deployment import DEPLOY

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
    spec |= {"terminationGracePeriodSeconds": predictor["terminationGracePeriodSeconds"]}
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
    needed_s = pre_stop_s + command["shutdown_delay_s"] + ServerConfig().drain_timeout_s
    assert needed_s < pod["terminationGracePeriodSeconds"]
