"""What training hands over, as files and as streams, and what a fleet agrees on about it.

Owns: the snapshot format (manifest, bucket order, row codecs, golden requests), its writer and reader, the store of
versions, the importers from checkpoints, the registry of versions and nodes (`loader.registry`), rollouts
(`loader.rollout`) and changed rows (`loader.deltas`).

Must not know: who serves a snapshot. No cards, no sharding plan, no ranking model, no request, no socket but the
registry's: it imports none of the other packages. It checks that golden requests fit the spec, not what a model
answers to them, and moves versions without knowing what a node does with one.

ARCHITECTURE.md shows how it works with the other packages.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loader.checkpoints.checkpoint import match_checkpoint, open_checkpoint
    from loader.checkpoints.named_tensors import Checkpoint
    from loader.deltas.publisher import DeltaPublisher
    from loader.progress import Progress, no_progress
    from loader.snapshot.codecs import RowCodec, codec_for
    from loader.snapshot.golden import GoldenRequests
    from loader.snapshot.manifest import (
        DenseInputs,
        DenseModelSpec,
        FeatureSpec,
        HashMapping,
        IdentityMapping,
        Manifest,
        ModelSpec,
        TableSpec,
        VocabularyMapping,
        fingerprint_strings,
    )
    from loader.snapshot.reader import Snapshot
    from loader.snapshot.row_source import (
        ArrayRows,
        IteratorRows,
        RowSource,
        SafetensorsRows,
        TensorRows,
        rows_from_blocks,
        rows_of,
    )
    from loader.snapshot.store import Store
    from loader.snapshot.verify import VerifyReport, verify_snapshot
    from loader.snapshot.writer import export_snapshot

# Found when asked for: a coordinator needs no PyTorch, and importing that takes longer than all else that it does at a
# start.
_NAMES = {
    "loader.checkpoints.checkpoint": "match_checkpoint open_checkpoint",
    "loader.snapshot.codecs": "RowCodec codec_for",
    "loader.deltas.publisher": "DeltaPublisher",
    "loader.snapshot.golden": "GoldenRequests",
    "loader.snapshot.manifest": (
        "DenseInputs DenseModelSpec FeatureSpec HashMapping IdentityMapping Manifest "
        "ModelSpec TableSpec VocabularyMapping fingerprint_strings"
    ),
    "loader.checkpoints.named_tensors": "Checkpoint",
    "loader.progress": "Progress no_progress",
    "loader.snapshot.reader": "Snapshot",
    "loader.snapshot.row_source": (
        "ArrayRows IteratorRows RowSource SafetensorsRows TensorRows rows_from_blocks rows_of"
    ),
    "loader.snapshot.store": "Store",
    "loader.snapshot.verify": "VerifyReport verify_snapshot",
    "loader.snapshot.writer": "export_snapshot",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "ArrayRows",
    "Checkpoint",
    "DeltaPublisher",
    "DenseInputs",
    "DenseModelSpec",
    "FeatureSpec",
    "GoldenRequests",
    "HashMapping",
    "IdentityMapping",
    "IteratorRows",
    "Manifest",
    "ModelSpec",
    "Progress",
    "RowCodec",
    "RowSource",
    "SafetensorsRows",
    "Snapshot",
    "Store",
    "TableSpec",
    "TensorRows",
    "VerifyReport",
    "VocabularyMapping",
    "codec_for",
    "export_snapshot",
    "fingerprint_strings",
    "match_checkpoint",
    "no_progress",
    "open_checkpoint",
    "rows_from_blocks",
    "rows_of",
    "verify_snapshot",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return found


def __dir__() -> list[str]:
    return __all__
