"""From the raw ids of requests to rows, table by table: what training looks up, and the reference for a router."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from loader.golden import GoldenRequests
from loader.manifest import HashMapping, ModelSpec, TableSpec, VocabularyMapping, fingerprint_strings
from loader.vocabulary import Vocabulary
from router.hashing import hashed_rows
from serving.training.errors import TrainingError
from serving.training.ragged import offsets_of
from shard_node.bags import Int64Array

_UNKNOWN = -1


def rows_of_ids(table: TableSpec, vocabulary: Vocabulary | None, ids: Int64Array) -> Int64Array:
    """int64 [n]: the row of each id, -1 where there is none."""
    if isinstance(table.id_mapping, HashMapping):
        seed, rows = np.array([table.id_mapping.seed], np.uint64), np.array([table.num_embeddings], np.uint64)
        return hashed_rows(ids, seed, rows)
    if not isinstance(table.id_mapping, VocabularyMapping):
        return np.where((ids >= 0) & (ids < table.num_embeddings), ids, _UNKNOWN)
    if vocabulary is None:
        raise TrainingError(f"table {table.name!r}: id mapping 'vocabulary' needs a vocabulary")
    known = (
        fingerprint_strings([str(word) for word in vocabulary])
        if table.id_mapping.id_type == "string"
        else np.asarray(vocabulary, np.int64)
    )
    order = np.argsort(known)
    position = order[np.minimum(np.searchsorted(known[order], ids), known.size - 1)]
    return np.where(known[position] == ids, position, _UNKNOWN)


def map_feature(
    table: TableSpec, vocabulary: Vocabulary | None, ids: Int64Array, lengths: npt.NDArray[np.int32], feature: str
) -> tuple[Int64Array, Int64Array]:
    """Maps one feature's bags.

    Args:
        table: where the feature is looked up.
        vocabulary: its ids in row order, if it has the vocabulary mapping.
        ids: int64 [nnz], bag by bag.
        lengths: int32 [B].
        feature: the feature's name, for the error.

    Returns:
        Rows int64, and offsets int64 [B + 1]; ids unknown under `skip` are left out.

    Raises:
        TrainingError: for an id that is unknown under `reject`.
    """
    rows, offsets = rows_of_ids(table, vocabulary, ids), offsets_of(lengths)
    unknown = rows == _UNKNOWN
    if not unknown.any():
        return rows, offsets
    if table.unknown_id == "reject":
        raise TrainingError(
            f"feature {feature!r}: id {ids[unknown.argmax()]} has no row in table {table.name!r} of "
            f"{table.num_embeddings} rows"
        )
    if table.unknown_id == "default_row":
        return np.where(unknown, table.default_row, rows), offsets
    kept_before = offsets_of(~unknown)
    return rows[~unknown], kept_before[offsets]


def map_requests(
    spec: ModelSpec, vocabularies: Mapping[str, Vocabulary], requests: GoldenRequests
) -> dict[str, tuple[Int64Array, Int64Array]]:
    """Rows and offsets of every feature. Raises TrainingError as `map_feature` does."""
    mapped = {}
    for feature in spec.features:
        table = spec.table_of(feature.name)
        mapped[feature.name] = map_feature(
            table,
            vocabularies.get(table.name),
            requests.values[feature.name],
            requests.lengths[feature.name],
            feature.name,
        )
    return mapped
