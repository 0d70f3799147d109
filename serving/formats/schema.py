"""What a request to one model version must look like: computed once, used by every codec."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from heapq import nlargest
from operator import eq
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from loader.snapshot.manifest import Side
from router.feature_schema import FeatureSchema
from serving.errors import AmbiguousInputsError, MissingFeatureError, UnknownFeatureError
from serving.limits import RequestLimits
from shard_node.bags import Int32Array, Int64Array

# The part of a request that a feature stands in. A lookup has only one part.
Part = Literal["context", "candidates", ""]
PART_OF_SIDE: dict[Side, Part] = {"context": "context", "candidate": "candidates"}

# An error names all of a model's features if they are few, else those that are spelled most alike.
MAX_NAMES_SHOWN = 10
MAX_NAME_CHARS = 128
_MAX_COMPARED = 32


def part_path(part: Part, rest: str) -> str:
    """`context.sparse`, or plain `sparse` in a lookup."""
    return f"{part}.{rest}" if part else rest


@dataclass(frozen=True)
class RequestSchema:
    """The features and dense inputs that a request must bring, in the flat order of `FeatureSchema`.

    Attributes:
        features: the model's features.
        limits: what a request may take.
    """

    features: FeatureSchema
    limits: RequestLimits

    @cached_property
    def inputs(self) -> InputNames:
        """The inputs that clients of the Open Inference Protocol call the model's features by."""
        return InputNames(self)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Feature names in flat order."""
        return tuple(feature.name for feature in self.features.features)

    @cached_property
    def candidate_names(self) -> tuple[str, ...]:
        """Candidate features in flat order."""
        return self.names_of("candidates")

    @cached_property
    def kinds(self) -> tuple[tuple[str, bool, bool], ...]:
        """Of each feature in flat order: its name, whether it is a context feature, and whether its ids are strings."""
        return tuple(zip(self.names, self.features.is_context.tolist(), self.is_string.tolist(), strict=True))

    @cached_property
    def keys(self) -> Int32Array:
        """int32 [F], 0..F-1: a rank request brings every feature."""
        return np.arange(len(self.names), dtype=np.int32)

    @cached_property
    def is_string(self) -> npt.NDArray[np.bool_]:
        """Bool [F], True where ids are strings."""
        return np.array([name in self.features.string_features for name in self.names], dtype=np.bool_)

    @cached_property
    def weighted_names(self) -> frozenset[str]:
        """Features whose ids may have weights."""
        return frozenset(one.name for one in self.features.features if one.weighted)

    @cached_property
    def is_weighted(self) -> npt.NDArray[np.bool_]:
        """Bool [F], True where ids may have weights."""
        return np.array([one.weighted for one in self.features.features], dtype=np.bool_)

    @cached_property
    def embedding_dims(self) -> Int64Array:
        """int64 [F], width of each feature's embeddings."""
        spec = self.features.spec
        return np.array([spec.table_of(name).embedding_dim for name in self.names], dtype=np.int64)

    @cached_property
    def num_context_dense(self) -> int:
        """Kc, dense values of a request."""
        return self.features.spec.dense_inputs.context

    @cached_property
    def num_candidate_dense(self) -> int:
        """Kd, dense values of a candidate."""
        return self.features.spec.dense_inputs.candidate

    @cached_property
    def name_sets(self) -> dict[Part, frozenset[str]]:
        """The features that may stand in each part."""
        return {part: frozenset(self.names_of(part)) for part in get_args(Part)}

    def names_of(self, part: Part) -> tuple[str, ...]:
        """The features that may stand in a part, in flat order."""
        return tuple(name for name in self.names if part in ("", self.part_of(name)))

    def part_of(self, name: str) -> Part:
        """The part of a rank request that a feature stands in. Raises KeyError."""
        return PART_OF_SIDE[self.features.spec.feature(name).side]

    def bags_per_key(self, num_candidates: int) -> Int64Array:
        """int64 [F], 1 for a context feature, N for a candidate feature."""
        return np.where(self.features.is_context, 1, num_candidates)

    def check_names(self, part: Part, given: Collection[str], *, all_needed: bool) -> None:
        """Refuse features that do not belong into a part, and missing ones.

        Raises:
            UnknownFeatureError: for one that the model does not have, or has on the other side.
            MissingFeatureError: for one that the model needs, if `all_needed`.
        """
        expected = self.name_sets[part]
        for name in given:
            if name not in expected:
                raise self.unknown_feature(part, name)
        if all_needed and (missing := [name for name in self.names_of(part) if name not in given]):
            raise MissingFeatureError(
                part_path(part, f"sparse.{missing[0]}"),
                f"model {self.features.spec.model!r} needs it, one of {len(missing)} that are missing",
            )

    def unknown_feature(self, part: Part, name: str) -> UnknownFeatureError:
        """The error for a feature that does not belong into a part."""
        name = name[:MAX_NAME_CHARS]
        path = part_path(part, f"sparse.{name}")
        if part and name in self.features.index:
            return UnknownFeatureError(path, f"it is a {self.features.spec.feature(name).side} feature")
        names = self.names_of(part)
        shown = str(list(names))
        if len(names) > MAX_NAMES_SHOWN:
            shown = f"{len(names)}, such as {get_close_matches(name, _most_alike(name, names), 3) or list(names[:3])}"
        model = self.features.spec.model
        return UnknownFeatureError(path, f"model {model!r} has no such feature here; it has {shown}")


def _most_alike(name: str, names: tuple[str, ...]) -> list[str]:
    """Those that begin and end most like a name. To compare it with a thousand letter by letter takes many ms."""

    def letters(other: str) -> int:
        forward, backward = map(eq, name, other), map(eq, reversed(name), reversed(other))
        return list(forward).count(True) + list(backward).count(True)

    return nlargest(_MAX_COMPARED, names, letters)


Datatype: TypeAlias = Literal["INT64", "INT32", "FP32", "BYTES"]
Role: TypeAlias = Literal["ids", "lengths", "weights", "context_dense", "candidate_dense"]

LENGTHS_SUFFIX = ".lengths"
WEIGHTS_SUFFIX = ".weights"
CONTEXT_DENSE = "context.dense"
CANDIDATE_DENSE = "candidates.dense"
SCORES = "scores"
ORDER = "order"
VARIES = -1


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output, as metadata tell of it.

    Attributes:
        name: its name.
        datatype: of its elements; inputs may come in others, see docs/open-inference-protocol.md.
        shape: -1 for a dimension that varies.
        optional: whether a request may leave it out.
        role: what an input is; None for an output.
        feature: flat index of the feature that an input belongs to; -1 if it is dense, or an output.
    """

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    optional: bool = False
    role: Role | None = None
    feature: int = -1


OUTPUTS = (TensorSpec(SCORES, "FP32", (VARIES,)), TensorSpec(ORDER, "INT64", (VARIES,)))
OUTPUT_NAMES = tuple(one.name for one in OUTPUTS)


@dataclass(frozen=True)
class InputNames:
    """The inputs of a model version, as its schema has them."""

    schema: RequestSchema

    @cached_property
    def by_name(self) -> dict[str, TensorSpec]:
        """Inputs by name, in the order in which metadata list them.

        Raises:
            AmbiguousInputsError: if two have the same name.
        """
        found: dict[str, TensorSpec] = {}
        for spec in self._specs():
            if spec.name in found:
                model = self.schema.features.spec.model
                raise AmbiguousInputsError(
                    f"model {model!r} has two inputs named {spec.name!r}, so it can't be called by this protocol; "
                    "rename the feature"
                )
            found[spec.name] = spec
        return found

    @cached_property
    def required(self) -> frozenset[str]:
        """Names of the inputs that every request has. Raises AmbiguousInputsError."""
        return frozenset(name for name, spec in self.by_name.items() if not spec.optional)

    def _specs(self) -> Iterator[TensorSpec]:
        schema = self.schema
        for key, feature in enumerate(schema.features.features):
            is_context = feature.side == "context"
            shape = (VARIES,) if is_context else (VARIES, VARIES)
            yield TensorSpec(feature.name, "BYTES" if schema.is_string[key] else "INT64", shape, False, "ids", key)
            if not is_context:
                yield TensorSpec(feature.name + LENGTHS_SUFFIX, "INT64", (VARIES,), True, "lengths", key)
            if feature.weighted:
                yield TensorSpec(feature.name + WEIGHTS_SUFFIX, "FP32", shape, True, "weights", key)
        if schema.num_context_dense:
            yield TensorSpec(CONTEXT_DENSE, "FP32", (schema.num_context_dense,), False, "context_dense")
        if schema.num_candidate_dense:
            yield TensorSpec(CANDIDATE_DENSE, "FP32", (VARIES, schema.num_candidate_dense), False, "candidate_dense")
