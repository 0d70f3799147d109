"""An inference request's tensors to the flat arrays of a rank request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from serving.errors import CountMismatchError, InvalidFieldError, LimitExceededError, MissingFeatureError
from serving.limits import RequestLimits
from serving.oip.infer_request import InferRequest, InputTensor, input_path
from serving.oip.input_columns import InputColumns, floats_of
from serving.oip.input_names import CANDIDATE_DENSE, CONTEXT_DENSE, OUTPUT_NAMES, InputNames
from serving.parse_checks import check_bags, check_dense, check_num_candidates, check_text, check_timeout, check_top_k
from serving.parse_schema import MAX_NAMES_SHOWN, RequestSchema
from serving.request import RankRequest
from shard_node.bags import Float32Array
from shard_node.generation import Lease

if TYPE_CHECKING:
    from serving.served_model import ServedModel


class InferParser:
    """Parses inference requests to one model version. Thread-safe.

    Attributes:
        names: its inputs.
    """

    def __init__(self, schema: RequestSchema) -> None:
        self._schema = schema
        self.names = InputNames(schema)

    def rank(self, request: InferRequest, lease: Lease[ServedModel], now: float) -> RankRequest:
        """Parses an inference request.

        Args:
            request: from one of the readers.
            lease: on the version that this parser belongs to.
            now: time of arrival on the monotonic clock, in seconds.

        Raises:
            BadRequestError: one of its subclasses, naming the input, the value and what is allowed.
            AmbiguousInputsError: if the model can't be called by this protocol.
        """
        schema, limits = self._schema, self._schema.limits
        _check_outputs(request)
        given = self._given(request.inputs)
        columns = InputColumns(schema, given, len(self.names.required))
        dense = given.get(CANDIDATE_DENSE)
        num_candidates = self._num_candidates(columns, dense)
        check_num_candidates(limits, num_candidates)
        bags = columns.bags(num_candidates)
        check_bags(schema, bags)
        context_dense = self._dense(given, CONTEXT_DENSE, schema.num_context_dense, rows=None)
        candidate_dense = self._dense(given, CANDIDATE_DENSE, schema.num_candidate_dense, rows=num_candidates)
        check_dense("context", context_dense)
        check_dense("candidates", candidate_dense)
        check_text(limits, "routing_key", request.routing_key)
        return RankRequest(
            lease=lease,
            bags=bags,
            num_candidates=num_candidates,
            context_dense=context_dense,
            candidate_dense=candidate_dense,
            deadline=now + _timeout_s(limits, request),
            top_k=check_top_k(request.top_k),
            request_id=check_text(limits, "request_id", request.id),
            texts=columns.texts,
        )

    def _given(self, inputs: Sequence[InputTensor]) -> dict[str, InputTensor]:
        """Inputs by name: all that the model has, but for optional ones, and no other."""
        known, given = self.names.by_name, {one.name: one for one in inputs}
        if len(given) != len(inputs):
            seen: set[str] = set()
            twice = next(one.name for one in inputs if one.name in seen or seen.add(one.name))  # type: ignore[func-returns-value]
            raise InvalidFieldError(input_path(twice), "it is given twice")
        if given.keys() == self.names.required:
            return given
        for name in given:
            if name not in known:
                raise self._unknown(name)
        for name in known:
            if name in self.names.required and name not in given:
                raise MissingFeatureError(input_path(name), f"model {self._schema.features.spec.model!r} needs it")
        return given

    def _unknown(self, name: str) -> Exception:
        """The error for an input that the model does not have."""
        known = self.names.by_name
        if len(known) > MAX_NAMES_SHOWN or name in self._schema.features.index:
            return self._schema.unknown_feature("", name)
        return InvalidFieldError(
            input_path(name), f"model {self._schema.features.spec.model!r} has no such input; it has {list(known)}"
        )

    def _num_candidates(self, columns: InputColumns, dense: InputTensor | None) -> int:
        if self._schema.candidate_names:
            return columns.num_bags(self._schema.features.index[self._schema.candidate_names[0]])
        return dense.shape[0] if dense is not None and len(dense.shape) else 0

    def _dense(self, given: Mapping[str, InputTensor], name: str, width: int, rows: int | None) -> Float32Array:
        """float32 [width], or [rows, width]; a copy, because the request's own bytes may be read-only."""
        shape = (width,) if rows is None else (rows, width)
        tensor = given.get(name)
        if tensor is None:
            return np.empty(shape, np.float32)
        allowed = (shape, (1, width)) if rows is None else (shape,)
        if tuple(tensor.shape) not in allowed:
            raise CountMismatchError(
                f"{input_path(name)}.shape", f"{list(tensor.shape)[:8]}; it must be {list(allowed[0])}"
            )
        return np.array(floats_of(tensor, int(np.prod(shape))), dtype=np.float32).reshape(shape)


def _check_outputs(request: InferRequest) -> None:
    """Raises InvalidFieldError for an output that there is not, or one that is asked for twice."""
    if request.outputs is None:
        return
    names = [one.name for one in request.outputs]
    for name in names:
        if name not in OUTPUT_NAMES:
            raise InvalidFieldError("outputs", f"there is no output {name[:128]!r}; there are {list(OUTPUT_NAMES)}")
    if len(set(names)) != len(names):
        raise InvalidFieldError("outputs", "an output is asked for twice")


def _timeout_s(limits: RequestLimits, request: InferRequest) -> float:
    """Seconds until the deadline. Raises LimitExceededError or InvalidFieldError."""
    # Triton's clients send 0 for none.
    timeout_us = request.timeout_us or None
    if timeout_us is None:
        return check_timeout(limits, request.timeout_ms)
    if timeout_us < 0:
        raise InvalidFieldError("timeout", f"{timeout_us} is not in 0..{1000 * limits.max_timeout_ms}")
    if timeout_us > 1000 * limits.max_timeout_ms:
        raise LimitExceededError("timeout", "max_timeout_ms", limits.max_timeout_ms, -(-timeout_us // 1000), "ms")
    timeout_s = timeout_us / 1e6
    return timeout_s if request.timeout_ms is None else min(timeout_s, check_timeout(limits, request.timeout_ms))
