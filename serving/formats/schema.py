"""What a request to one model version must have: computed once, used by every codec."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from difflib import get_close_matches
from functools import cached_property
from heapq import nlargest
from operator import eq
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from loader.snapshot.manifest import Side
from router.feature_schema import FeatureSchema
from serving.errors import InvalidRequestError, count_mismatch, limit_exceeded, missing_feature, unknown_feature
from serving.limits import RequestLimits
from shard_node.bags import Int32Array, Int64Array

# The part of a request that a feature stands in. A lookup has only one part.
Part = Literal["context", "candidates", ""]
PARTS: tuple[Part, ...] = get_args(Part)
PART_OF_SIDE: dict[Side, Part] = {"context": "context", "candidate": "candidates"}

# An error names all of a model's features if they are few, else those that are spelled most alike.
MAX_NAMES_SHOWN = 10
MAX_NAME_CHARS = 128
_MAX_COMPARED = 32


def part_path(part: Part, member: str) -> str:
    """`context.sparse`, or plain `sparse` in a lookup."""
    return f"{part}.{member}" if part else member


Datatype: TypeAlias = Literal["INT64", "INT32", "FP32", "BYTES"]

LENGTHS_SUFFIX = ".lengths"
WEIGHTS_SUFFIX = ".weights"
CONTEXT_DENSE = "context.dense"
CANDIDATE_DENSE = "candidates.dense"
SCORES = "scores"
ORDER = "order"
VARIES = -1


class TensorSpec(NamedTuple):
    """An input or output of the Open Inference Protocol, as in metadata; `shape` has -1 for a dimension that varies.

    Inputs may come in other datatypes, see docs/open-inference-protocol.md.
    """

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    optional: bool = False


class RequestSchema:
    """The features and dense inputs that a request must bring, in the flat order of `FeatureSchema`.

    Attributes:
        features: the model's features, F of them.
        names, kinds: of each feature its name; and with it whether it is a context feature, and has strings for ids.
        keys: int32 [F], 0..F-1.
        is_string, is_weighted, is_keyed: bool [F], whether ids are strings, may have weights, are keys of a table.
        name_sets: the features of each part.
        candidate_names: in flat order.
        embedding_dims: int64 [F].
        outputs: of the Open Inference Protocol by name.
        num_context_dense, num_candidate_dense: Kc, dense values of a request; Kd, those of a candidate.
    """

    def __init__(self, features: FeatureSchema, limits: RequestLimits) -> None:
        self.features, self.limits = features, limits
        spec, every = features.spec, features.features
        self.names = tuple(feature.name for feature in every)
        self.keys: Int32Array = np.arange(len(every), dtype=np.int32)
        self.is_string = np.array([name in features.string_features for name in self.names], dtype=np.bool_)
        self.is_weighted = np.array([feature.weighted for feature in every], dtype=np.bool_)
        self.is_keyed = features.layout.is_keyed[features.table_index]
        self._of_context = features.is_context.astype(np.int64)
        self.kinds = tuple(zip(self.names, features.is_context.tolist(), self.is_string.tolist(), strict=True))
        self.weighted_names = frozenset(feature.name for feature in every if feature.weighted)
        self.name_sets = {part: frozenset(self.names_of(part)) for part in PARTS}
        self.candidate_names = self.names_of("candidates")
        self.embedding_dims: Int64Array = np.array([spec.table_of(name).embedding_dim for name in self.names], np.int64)
        specs = TensorSpec(SCORES, "FP32", (VARIES,)), TensorSpec(ORDER, "INT64", (VARIES,))
        named = (TensorSpec(name, "FP32", (VARIES,)) for name in spec.dense_model.outputs)
        self.outputs = {tensor.name: tensor for tensor in (*specs, *named)}
        self.num_context_dense, self.num_candidate_dense = spec.dense_inputs.context, spec.dense_inputs.candidate

    @cached_property
    def inputs(self) -> dict[str, TensorSpec]:
        """Inputs of the Open Inference Protocol by name. Raises InvalidRequestError if two have the same name."""
        inputs: dict[str, TensorSpec] = {}
        for tensor in self._input_specs():
            if tensor.name in inputs:
                problem = f"model {self.features.spec.model!r} has two inputs named {tensor.name!r}, so it can't be "
                problem += "called by this protocol; rename the feature"
                raise InvalidRequestError("", problem, kind="ambiguous_inputs")
            inputs[tensor.name] = tensor
        return inputs

    @cached_property
    def required_inputs(self) -> frozenset[str]:
        """Names of the inputs that every request has. Raises InvalidRequestError."""
        return frozenset(name for name, tensor in self.inputs.items() if not tensor.optional)

    def _input_specs(self) -> Iterator[TensorSpec]:
        for name, is_context, is_string in self.kinds:
            shape = (VARIES,) if is_context else (VARIES, VARIES)
            yield TensorSpec(name, "BYTES" if is_string else "INT64", shape)
            if not is_context:
                yield TensorSpec(name + LENGTHS_SUFFIX, "INT64", (VARIES,), optional=True)
            if name in self.weighted_names:
                yield TensorSpec(name + WEIGHTS_SUFFIX, "FP32", shape, optional=True)
        if self.num_context_dense:
            yield TensorSpec(CONTEXT_DENSE, "FP32", (self.num_context_dense,))
        if self.num_candidate_dense:
            yield TensorSpec(CANDIDATE_DENSE, "FP32", (VARIES, self.num_candidate_dense))

    def names_of(self, part: Part) -> tuple[str, ...]:
        """Return the features that may stand in a part, in flat order."""
        return tuple(name for name in self.names if part in ("", self.part_of(name)))

    def part_of(self, name: str) -> Part:
        """Return the part of a rank request that a feature stands in. Raises KeyError."""
        return PART_OF_SIDE[self.features.spec.feature(name).side]

    def feature_path(self, name: str, *, is_lookup: bool) -> str:
        """Name a feature in errors, such as `candidates.sparse.film_id`."""
        return part_path("" if is_lookup else self.part_of(name), f"sparse.{name}")

    def bags_per_key(self, num_candidates: int) -> Int64Array:
        """int64 [F], 1 for a context feature, N for a candidate feature."""
        return self._of_context + num_candidates * (1 - self._of_context)

    def check_num_candidates(self, num_candidates: int) -> None:
        """Raise InvalidRequestError for none or too many."""
        limits = self.limits
        if num_candidates < 1:
            raise count_mismatch("candidates", "0 candidates; a rank request needs at least 1")
        if num_candidates > limits.max_candidates:
            raise limit_exceeded("candidates", "max_candidates", limits.max_candidates, num_candidates, "candidates")

    def check_names(self, part: Part, given: Collection[str], *, all_needed: bool) -> None:
        """Raise InvalidRequestError for features that are not of a part, and with `all_needed` for a missing one."""
        expected = self.name_sets[part]
        for name in given:
            if name not in expected:
                raise self.unknown_feature(part, name)
        if all_needed and (missing := [name for name in self.names_of(part) if name not in given]):
            raise missing_feature(
                part_path(part, f"sparse.{missing[0]}"),
                f"model {self.features.spec.model!r} needs it, one of {len(missing)} that are missing",
            )

    def unknown_feature(self, part: Part, name: str) -> InvalidRequestError:
        """Return the error for a feature that does not belong into a part."""
        name = name[:MAX_NAME_CHARS]
        path = part_path(part, f"sparse.{name}")
        if part and name in self.features.index:
            return unknown_feature(path, f"it is a {self.features.spec.feature(name).side} feature")
        names = self.names_of(part)
        shown = str(list(names))
        if len(names) > MAX_NAMES_SHOWN:
            shown = f"{len(names)}, such as {get_close_matches(name, _similar(name, names), 3) or list(names[:3])}"
        return unknown_feature(path, f"model {self.features.spec.model!r} has no such feature here; it has {shown}")


def _similar(name: str, names: tuple[str, ...]) -> list[str]:
    """Those that begin and end most like a name. To compare it with a thousand letter by letter takes many ms."""

    def num_common(other: str) -> int:
        return [*map(eq, name, other), *map(eq, reversed(name), reversed(other))].count(True)

    return nlargest(_MAX_COMPARED, names, num_common)
