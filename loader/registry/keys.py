"""Where each record lies in a registry."""

from __future__ import annotations

FLEET = "fleet"
VERSIONS = "versions/"
WANTED = "wanted/"
ROLLOUTS = "rollouts/"
NODES = "nodes/"
COORDINATOR_LOCK = "locks/coordinator"
STAGING_LOCKS = "locks/staging/"


def version_key(model: str, version: int) -> str:
    """Of a `PublishedVersion`. Padded, so that versions sort as numbers."""
    return f"{VERSIONS}{model}/{version:020d}"


def wanted_key(model: str) -> str:
    """Of a `WantedModel`."""
    return f"{WANTED}{model}"


def rollout_key(model: str) -> str:
    """Of a `Rollout`."""
    return f"{ROLLOUTS}{model}"


def node_key(node_id: str) -> str:
    """Of a `NodeRecord`; announced, not put."""
    return f"{NODES}{node_id}"


def delta_stream(model: str, delta_base: int) -> str:
    """The stream of changed rows that began with a version."""
    return f"deltas/{model}/{delta_base}"
