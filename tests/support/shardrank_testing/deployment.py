"""What stands in deploy/: manifests as they are in the files, and rendered."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
BASE = DEPLOY / "kubernetes" / "base"


def base_documents() -> list[dict[str, Any]]:
    """Every object of the base as it stands in the files, without kustomize."""
    names = yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
    return [one for name in names for one in yaml.safe_load_all((BASE / name).read_text())]


def rendered(overlay: str) -> list[dict[str, Any]]:
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
