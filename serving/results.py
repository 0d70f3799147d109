"""What requests return, the same from a server, by its client, and in the process that ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Float32Array: TypeAlias = npt.NDArray[np.float32]
Int64Array: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Bags of different lengths in flat arrays.

    Attributes:
        values: all bags' values, one bag after the other: integers or strings [n], weights [n], or in the answer to a
            lookup float32 [n, embedding_dim].
        lengths: integers [bags], how many values each bag has.
    """

    values: Any
    lengths: Any


@dataclass(frozen=True, slots=True, eq=False)
class MissingKeys:
    """Keys of one feature that its table did not have.

    Attributes:
        bags: int64 [k], the bag of each: a candidate's number; 0 of a context feature.
        keys: int64 [k]; of string ids their fingerprints.
    """

    bags: Int64Array
    keys: Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class RankResult:
    """Scores of one request.

    Attributes:
        version: the same for all scores.
        scores: float32 [N], in the order of the candidates.
        order: int64 [N or top_k], positions of the candidates by descending score; equal scores by position.
        dense_step: of the dense model's weights that gave every score; 0 for those of the version itself.
        outputs: float32 [N] for each output that the model names; none of a built-in model.
        delta_sequence: every row was of this delta or a later one; -1 where that is not known.
        age_ms: since the last moment whose row updates are all in the rows; -1 where that is not known.
        missing: by feature, of those that lacked a key, if that was asked for; else None.
    """

    model: str
    version: int
    scores: Float32Array
    order: Int64Array
    request_id: str = ""
    dense_step: int = 0
    outputs: Mapping[str, Float32Array] = field(default_factory=dict)
    delta_sequence: int = -1
    age_ms: int = -1
    missing: Mapping[str, MissingKeys] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LookupResult:
    """Embeddings by feature: float32 [bags, embedding_dim], or if not pooled `Ragged` of [ids, embedding_dim]."""

    model: str
    version: int
    embeddings: dict[str, Float32Array | Ragged]
    request_id: str = ""
    delta_sequence: int = -1
    age_ms: int = -1
    missing: Mapping[str, MissingKeys] | None = None
