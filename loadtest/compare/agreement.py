"""Do all arms give the same scores? A few requests, asked of each arm's server in the first round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import TypeAdapter, ValidationError

from loadtest.compare.arm_server import ASK_TIMEOUT_S, HOST
from loadtest.compare.config import Arm, Dtype
from loadtest.compare.errors import ArmsDisagreeError, ArmServerError
from serving.client import AsyncClient, ClientError
from shard_node.bags import Float32Array

CHECKED_REQUESTS = 8
TOLERANCES: dict[Dtype, float] = {"float32": 1e-5, "bfloat16": 0.01}
"""Of scores, which are between 0 and 1. Where rows are divided otherwise, parts of a sum are added in another order; in
bfloat16, a sum whose last bit differs may become the next number, 0.4% away, at the input of every layer. Measured with
random models, whose scores spread by 0.03 to 0.05: up to 3e-7 between arms in float32 and 0.0016 in bfloat16."""

_DTYPE: TypeAdapter[Dtype] = TypeAdapter(Dtype)


@dataclass(frozen=True, slots=True)
class ArmScores:
    """What an arm's server answered.

    Attributes:
        dtype: that its dense model is computed in.
        scores: float32 [candidates] of each request that was asked.
    """

    dtype: Dtype
    scores: tuple[Float32Array, ...]


async def served_dtype(arm: Arm, http_port: int, model: str) -> Dtype:
    """What a server computes its dense model in.

    Raises:
        ArmServerError: it does not say.
    """
    address = f"http://{HOST}:{http_port}"
    try:
        async with AsyncClient(address, timeout_ms=int(1000 * ASK_TIMEOUT_S)) as client:
            description = await client.describe(model)
        return _DTYPE.validate_python(description.dense_model.dtype)
    except (ClientError, ValidationError) as error:
        raise ArmServerError(f"the server with {arm.name} does not describe its model at {address}: {error}") from error


def check_agreement(first: Arm, expected: ArmScores, arm: Arm, found: ArmScores) -> None:
    """Compares an arm's answers with the first one's.

    Args:
        first: the first arm.
        expected: its answers.
        arm: another one.
        found: its answers to the same requests.

    Raises:
        ArmsDisagreeError: naming arm, request and difference.
    """
    if found.dtype != expected.dtype:
        raise ArmsDisagreeError(
            f"{arm.name}: its dense model is computed in {found.dtype}, that of {first.name} in {expected.dtype}; "
            "choose one with --dtype"
        )
    allowed = TOLERANCES[expected.dtype]
    for number, (one, other) in enumerate(zip(expected.scores, found.scores, strict=True)):
        if one.shape != other.shape:
            raise ArmsDisagreeError(
                f"{arm.name}, request {number}: {other.size} scores, but {one.size} with {first.name}"
            )
        differences = np.abs(other - one)
        candidate = int(differences.argmax())
        # A NaN is not within any tolerance.
        if not differences[candidate] <= allowed:
            raise ArmsDisagreeError(
                f"{arm.name}, request {number}, candidate {candidate}: its score is {other[candidate]:.6f}, but "
                f"{one[candidate]:.6f} with {first.name}; they differ by {differences[candidate]:.3g}, allowed is "
                f"{allowed:g} in {expected.dtype}"
            )


def largest_difference(answers: Sequence[ArmScores]) -> float:
    """Between the first arm's scores and any other's."""
    first = answers[0].scores
    return max(
        (float(np.abs(other - one).max()) for arm in answers[1:] for one, other in zip(first, arm.scores, strict=True)),
        default=0.0,
    )
