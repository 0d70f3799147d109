"""The inputs and outputs of one model version, by the names that the protocol's clients use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from serving.oip.errors import AmbiguousInputsError
from serving.parse_schema import RequestSchema

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
    """The inputs of a model version.

    Attributes:
        schema: what a request to it looks like.
    """

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
