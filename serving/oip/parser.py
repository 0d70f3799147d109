"""An inference request's tensors to the flat arrays of a rank request."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from serving.errors import InvalidFieldError, LimitExceededError, MissingFeatureError
from serving.form_cache import FormCache
from serving.limits import RequestLimits
from serving.oip.infer_request import InferInputs, InferRequest, InputTensor, input_path
from serving.oip.input_columns import BinaryElements, Elements, GivenElements, bags_of, dense_of
from serving.oip.input_layout import InputLayout, LayoutMaker
from serving.oip.input_names import OUTPUT_NAMES, InputNames
from serving.oip.raw_data import RawData
from serving.parse_checks import check_dense, check_text, check_timeout, check_top_k
from serving.parse_schema import MAX_NAMES_SHOWN, RequestSchema
from serving.request import RankRequest
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
        self._layouts: FormCache[Hashable, InputLayout] = FormCache()

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
        schema, limits, inputs = self._schema, self._schema.limits, request.inputs
        _check_outputs(request)
        layout = None if inputs.form is None else self._layouts.find(inputs.form)
        elements: Elements
        if layout is None or layout.binary_bytes != len(inputs.binary):
            layout, elements = self._read(inputs)
        else:
            elements = BinaryElements(inputs)
        num_candidates = layout.num_candidates
        bags, texts = bags_of(schema, layout, elements)
        context_dense = dense_of(layout.context_dense, elements, (schema.num_context_dense,))
        candidate_dense = dense_of(layout.candidate_dense, elements, (num_candidates, schema.num_candidate_dense))
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
            texts=texts,
        )

    def _read(self, inputs: InferInputs) -> tuple[InputLayout, Elements]:
        """The layout of inputs of a form that was not met before, and where their elements are."""
        tensors = inputs.read()
        given = self._given(tensors)
        is_binary = inputs.form is not None and all(isinstance(one.data, RawData) for one in tensors)
        layout = LayoutMaker(self._schema, given, len(self.names.required), is_binary=is_binary).make(inputs.form_bytes)
        if not is_binary:
            return layout, GivenElements(given)
        self._layouts.add(inputs.form, layout)
        return layout, BinaryElements(inputs)

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
