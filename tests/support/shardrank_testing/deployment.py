"""What stands in deploy/: rendered manifests, command lines, and whether this release's commands take them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import yaml

from serving.cli import main

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
BASE = DEPLOY / "kubernetes" / "base"


def base_documents() -> list[dict[str, Any]]:
    """Every object of the base as it stands in the files, without kustomize."""
    names = yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
    return [one for name in names for one in yaml.safe_load_all((BASE / name).read_text())]


def rendered(overlay: str) -> list[dict[str, Any]] | None:
    """Every object of an overlay as `kubectl kustomize` renders it; None where kubectl is not installed."""
    if (kubectl := shutil.which("kubectl")) is None:
        return None
    command = [kubectl, "kustomize", str(DEPLOY / "kubernetes" / "overlays" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return list(yaml.safe_load_all(done.stdout))


def pods(documents: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, pod template) of each workload."""
    for one in documents:
        if one["kind"] in ("Deployment", "StatefulSet"):
            yield one["metadata"]["name"], one["spec"]["template"]


def parse_command_line(arguments: Sequence[str]) -> dict[str, Any]:
    """Parses a `shardrank` command line without running it. Raises click.UsageError for a flag that does not exist."""
    command: click.Command = main
    context = click.Context(main, info_name="shardrank")
    rest = list(arguments)
    while isinstance(command, click.Group):
        _, found, rest = command.resolve_command(context, rest)
        assert found is not None
        command = found
        if not isinstance(command, click.Group):
            return dict(command.make_context(command.name, rest, parent=context).params)
        context = click.Context(command, info_name=command.name, parent=context)
    raise AssertionError("the root is a group")
