"""PromQL expressions held against the metrics that processes tell: names, types, labels, and labels' values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import promql_parser as promql
from prometheus_client.parser import text_string_to_metric_families

import loader.errors
import router.errors
import serving.errors
import shard_node.errors
from serving.observe.calls import STAGES, Outcome
from serving.observe.metrics import BATCH_STAGES, CALL_STAGES, ServingMetrics
from serving.observe.node_metrics import NodeMetrics
from serving.observe.watch import collected
from shard_node.engine.base import Tier
from shard_node.generation import GenerationState
from shard_node.node import ShardNode
from shard_node.partition import NodeIdentity

TARGET_LABELS = frozenset({"job", "instance"})
"""Which Prometheus gives to all that it scrapes."""
_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",)}
_OF_COUNTERS = {"rate", "increase", "irate"}
_SETS = {"and", "or", "unless"}
_FLEET = {"$model": ".*", "$__rate_interval": "1m", "$__range": "1h"}


class ExpressionError(Exception):
    """An expression that can't give what it is meant to."""


@dataclass
class Series:
    """All samples of one name: its labels, those of a target left out, and what was seen of their values."""

    labels: frozenset[str]
    counts_up: bool = False
    seen: dict[str, set[str]] = field(default_factory=dict)


def told_series(texts: Iterable[str]) -> dict[str, Series]:
    """All series, by name, of `/metrics` pages. What has had no event has a family's name there, and no sample.

    The labels of those are what the code declares; where there are samples, both must agree.
    """
    declared, found = _declared_labels(), {}
    for text in texts:
        families = text_string_to_metric_families(text)
        for family in (one for one in families if not one.name.endswith("_created")):
            for suffix in _SUFFIXES.get(family.type, ()):
                name = family.name + suffix
                labels = declared.get(family.name, frozenset()) | ({"le"} if suffix == "_bucket" else set())
                series = found.setdefault(name, Series(labels, family.type != "gauge"))
                for sample in (one for one in family.samples if one.name == name):
                    assert series.labels == sample.labels.keys(), f"{name}: {sample.labels}, declared is {labels}"
                    for label, value in sample.labels.items():
                        series.seen.setdefault(label, set()).add(value)
    # Prometheus' own, one for each target.
    return found | {"up": Series(frozenset())}


def _declared_labels() -> dict[str, frozenset[str]]:
    node = ShardNode(NodeIdentity(shard_index=0, num_shards=1, num_cards=1, sharding="hash"))
    registries = ServingMetrics()._registry, NodeMetrics(node)._registry
    own = [one for registry in registries for one in registry._collector_to_names if hasattr(one, "_labelnames")]
    labels = {one._name: frozenset(one._labelnames) for one in own}
    return labels | {one.name: frozenset(one._labelnames) for one in collected(())}


def _error_kinds() -> set[str]:
    trees = (loader.errors, router.errors, serving.errors, shard_node.errors)
    return {one.kind for tree in trees for one in vars(tree).values() if hasattr(one, "kind")}


_VALUES: Mapping[str, set[str]] = {
    "kind": _error_kinds() | {"late"},
    "status": _error_kinds() | {"ok"},
    "outcome": set(get_args(Outcome)),
    "state": set(get_args(GenerationState)),
    "tier": set(get_args(Tier)),
    "stage": {*STAGES, *CALL_STAGES, *BATCH_STAGES},
}
"""Values that a label can have, also before it has them."""


class Reader:
    """Reads expressions against series; `jobs` are the names that a scrape configuration gives to targets."""

    def __init__(self, series: Mapping[str, Series], jobs: Sequence[str]) -> None:
        self._series = series
        self._values: dict[str, set[str]] = {"job": set(jobs), "replica": {"local"}}
        for one in series.values():
            for label, seen in one.seen.items():
                self._values[label] = self._values.get(label, set()) | seen
        self._values |= _VALUES

    def read(self, text: str) -> frozenset[str]:
        """Give the labels of what an expression gives. Raises ExpressionError, or ValueError if it can't be parsed."""
        for variable, value in _FLEET.items():
            text = text.replace(variable, value)
        labels = self._labels(promql.parse(text))
        if labels is None:
            raise ExpressionError("it is a number")
        return labels

    def _labels(self, node: Any) -> frozenset[str] | None:
        """Labels of an expression's result; None for a number. It is read by its type."""
        match type(node).__name__:
            case "NumberLiteral" | "StringLiteral":
                return None
            case "ParenExpr" | "UnaryExpr" | "SubqueryExpr":
                return self._labels(node.expr)
            case "MatrixSelector":
                return self._selected(node.vector_selector)
            case "VectorSelector":
                return self._selected(node)
            case "AggregateExpr":
                return self._aggregated(node)
            case "BinaryExpr":
                return self._joined(node)
            case "Call":
                return self._called(node)
        raise ExpressionError(f"{type(node).__name__} is not known here")

    def _find(self, name: str) -> Series:
        if name not in self._series:
            raise ExpressionError(f"no process tells {name}")
        return self._series[name]

    def _selected(self, selector: Any) -> frozenset[str]:
        series = self._find(selector.name)
        for matcher in selector.matchers.matchers:
            if matcher.name not in series.labels | TARGET_LABELS:
                raise ExpressionError(f"{selector.name} has no label {matcher.name}, but {sorted(series.labels)}")
            known = self._values.get(matcher.name, set())
            for value in matcher.value.split("|"):
                if not any(re.fullmatch(value, one) for one in known):
                    raise ExpressionError(f"label {matcher.name} is never {value!r}; it is one of {sorted(known)}")
        return series.labels | TARGET_LABELS

    def _aggregated(self, node: Any) -> frozenset[str]:
        labels = self._labels(node.expr)
        if labels is None:
            raise ExpressionError(f"{node.op} of a number")
        if node.modifier is None:
            return labels if str(node.op) in ("topk", "bottomk") else frozenset()
        named = frozenset(node.modifier.labels)
        if not named <= labels:
            raise ExpressionError(f"{node.modifier} of what has no {sorted(named - labels)}, but {sorted(labels)}")
        return named if node.modifier.type == promql.AggModifierType.By else labels - named

    def _joined(self, node: Any) -> frozenset[str] | None:
        left, right = self._labels(node.lhs), self._labels(node.rhs)
        if left is None or right is None:
            return right if left is None else left
        modifier = node.modifier
        if modifier is None or modifier.matching is None:
            # Series are joined by all labels: where they differ in one, nothing is.
            if left != right:
                raise ExpressionError(f"{node.op} of {sorted(left)} and {sorted(right)} gives nothing")
            return left
        named = frozenset(modifier.matching.labels)
        if not named <= left & right:
            raise ExpressionError(f"{node.op} on {sorted(named)} of {sorted(left)} and {sorted(right)}")
        return left

    def _called(self, node: Any) -> frozenset[str] | None:
        name = node.func.name
        found = [labels for argument in node.args if (labels := self._labels(argument)) is not None]
        if name in _OF_COUNTERS:
            (argument,) = node.args
            if not self._find(argument.vector_selector.name).counts_up:
                raise ExpressionError(f"{name} of {argument}, which is a gauge")
        if name == "histogram_quantile":
            if "le" not in found[0]:
                raise ExpressionError(f"histogram_quantile of {sorted(found[0])}, without le")
            return found[0] - {"le"}
        return found[0] if found else None
