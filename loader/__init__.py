"""What training hands over, as files.

Owns: the snapshot format (manifest, bucket order, row codecs, golden requests), its writer and reader, the store of
versions, and the importers from checkpoints.

Must not know: who serves a snapshot. No sockets, no cards, no sharding plan, no ranking model, no request: it imports
none of the other packages. It checks that golden requests fit the spec, not what a model answers to them.
"""

from loader.checkpoint import Checkpoint, open_checkpoint
from loader.checkpoint_match import match_checkpoint
from loader.codecs import RowCodec, codec_for
from loader.fingerprint import fingerprint_strings
from loader.golden import GoldenRequests
from loader.manifest import (
    DenseInputs,
    DenseModelSpec,
    FeatureSpec,
    HashMapping,
    IdentityMapping,
    Manifest,
    ModelSpec,
    TableSpec,
    VocabularyMapping,
)
from loader.progress import Progress, no_progress
from loader.reader import Snapshot
from loader.row_source import (
    ArrayRows,
    IteratorRows,
    RowSource,
    SafetensorsRows,
    TensorRows,
    rows_from_blocks,
    rows_of,
)
from loader.store import Store
from loader.verify import VerifyReport, verify_snapshot
from loader.writer import export_snapshot

__all__ = [
    "ArrayRows",
    "Checkpoint",
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
