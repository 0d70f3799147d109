"""The public names of shardrank. Whatever is not here may change without notice.

Each name is imported when it is first used, so a client of a server loads no PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loader.deltas.blocking_publisher import DeltaPublisher as DeltaPublisher
    from loader.deltas.publisher import AsyncDeltaPublisher as AsyncDeltaPublisher
    from loader.deltas.row_tracker import RowTracker as RowTracker
    from loader.description import ModelDescription as ModelDescription
    from loader.divided_rows import divide_rows as divide_rows
    from loader.divided_rows import kept_rows as kept_rows
    from loader.errors import CheckpointError as CheckpointError
    from loader.errors import ConfigError as ConfigError
    from loader.errors import DeadlineExceededError as DeadlineExceededError
    from loader.errors import DeltaError as DeltaError
    from loader.errors import DeltaFormatError as DeltaFormatError
    from loader.errors import DeltaLostError as DeltaLostError
    from loader.errors import ExportError as ExportError
    from loader.errors import OverloadedError as OverloadedError
    from loader.errors import PublisherSupersededError as PublisherSupersededError
    from loader.errors import RegistryConflictError as RegistryConflictError
    from loader.errors import RegistryError as RegistryError
    from loader.errors import RegistryForeignError as RegistryForeignError
    from loader.errors import RegistryRecordError as RegistryRecordError
    from loader.errors import RegistryUnavailableError as RegistryUnavailableError
    from loader.errors import ShardrankError as ShardrankError
    from loader.errors import SnapshotCorruptError as SnapshotCorruptError
    from loader.errors import SnapshotError as SnapshotError
    from loader.errors import SnapshotExistsError as SnapshotExistsError
    from loader.errors import SnapshotNotFoundError as SnapshotNotFoundError
    from loader.errors import SnapshotResourceError as SnapshotResourceError
    from loader.errors import StoreError as StoreError
    from loader.errors import StreamFullError as StreamFullError
    from loader.errors import StreamSequenceError as StreamSequenceError
    from loader.errors import UnavailableError as UnavailableError
    from loader.registry import open_registry as open_registry
    from loader.registry.registry import Registry as Registry
    from loader.snapshot.golden import GoldenRequests as GoldenRequests
    from loader.snapshot.manifest import DenseInputs as DenseInputs
    from loader.snapshot.manifest import DenseModelSpec as DenseModelSpec
    from loader.snapshot.manifest import ExportedModelSpec as ExportedModelSpec
    from loader.snapshot.manifest import FeatureSpec as FeatureSpec
    from loader.snapshot.manifest import ModelSpec as ModelSpec
    from loader.snapshot.reader import Snapshot as Snapshot
    from loader.snapshot.reader import verify_snapshot as verify_snapshot
    from loader.snapshot.row_source import ArrayRows as ArrayRows
    from loader.snapshot.row_source import RowsFromBlocks as RowsFromBlocks
    from loader.snapshot.row_source import SafetensorsRows as SafetensorsRows
    from loader.snapshot.tables import HashMapping as HashMapping
    from loader.snapshot.tables import IdentityMapping as IdentityMapping
    from loader.snapshot.tables import TableSpec as TableSpec
    from loader.snapshot.tables import VocabularyMapping as VocabularyMapping
    from loader.snapshot.tables import fingerprint_strings as fingerprint_strings
    from loader.snapshot.writer import export_snapshot as export_snapshot
    from router.errors import PlanError as PlanError
    from router.id_mapping import hashed_rows as hashed_rows
    from serving.client.client import AsyncClient as AsyncClient
    from serving.client.client import Client as Client
    from serving.client.client import RetryPolicy as RetryPolicy
    from serving.embedded import Ranker as Ranker
    from serving.errors import InternalError as InternalError
    from serving.errors import InvalidRequestError as InvalidRequestError
    from serving.errors import NotFoundError as NotFoundError
    from serving.errors import PermissionDeniedError as PermissionDeniedError
    from serving.errors import RankingModelError as RankingModelError
    from serving.errors import UnauthenticatedError as UnauthenticatedError
    from serving.exporting import export as export
    from serving.limits import RequestLimits as RequestLimits
    from serving.models.exported import check_program as check_program
    from serving.models.exported import export_program as export_program
    from serving.models.inputs import RankingInputs as RankingInputs
    from serving.models.inputs import SequenceInput as SequenceInput
    from serving.models.ranking_models import build_model as build_model
    from serving.results import LookupResult as LookupResult
    from serving.results import Ragged as Ragged
    from serving.results import RankResult as RankResult
    from shard_node.cuda.card_set import CardOptions as CardOptions
    from shard_node.errors import CardError as CardError
    from shard_node.errors import CardsUnavailableError as CardsUnavailableError
    from shard_node.errors import DeviceChoiceError as DeviceChoiceError
    from shard_node.errors import MemoryBudgetError as MemoryBudgetError

_NAMES = {
    "loader.deltas.blocking_publisher": "DeltaPublisher",
    "loader.deltas.publisher": "AsyncDeltaPublisher",
    "loader.deltas.row_tracker": "RowTracker",
    "loader.description": "ModelDescription",
    "loader.divided_rows": "divide_rows kept_rows",
    "loader.errors": (
        "CheckpointError ConfigError DeadlineExceededError DeltaError DeltaFormatError DeltaLostError ExportError "
        "OverloadedError PublisherSupersededError RegistryConflictError RegistryError RegistryForeignError "
        "RegistryRecordError RegistryUnavailableError ShardrankError "
        "SnapshotCorruptError SnapshotError SnapshotExistsError SnapshotNotFoundError SnapshotResourceError StoreError "
        "StreamFullError StreamSequenceError UnavailableError"
    ),
    "loader.registry": "open_registry",
    "loader.registry.registry": "Registry",
    "loader.snapshot.golden": "GoldenRequests",
    "loader.snapshot.manifest": "DenseInputs DenseModelSpec ExportedModelSpec FeatureSpec ModelSpec",
    "loader.snapshot.tables": "HashMapping IdentityMapping TableSpec VocabularyMapping fingerprint_strings",
    "loader.snapshot.row_source": "ArrayRows RowsFromBlocks SafetensorsRows",
    "loader.snapshot.reader": "Snapshot verify_snapshot",
    "loader.snapshot.writer": "export_snapshot",
    "router.errors": "PlanError",
    "router.id_mapping": "hashed_rows",
    "serving.client.client": "AsyncClient Client RetryPolicy",
    "serving.embedded": "Ranker",
    "serving.errors": (
        "InternalError InvalidRequestError NotFoundError PermissionDeniedError RankingModelError UnauthenticatedError"
    ),
    "serving.exporting": "export",
    "serving.limits": "RequestLimits",
    "serving.models.exported": "check_program export_program",
    "serving.models.inputs": "RankingInputs SequenceInput",
    "serving.models.ranking_models": "build_model",
    "serving.results": "LookupResult Ragged RankResult",
    "shard_node.cuda.card_set": "CardOptions",
    "shard_node.errors": "CardError CardsUnavailableError DeviceChoiceError MemoryBudgetError",
}
_RENAMED = {
    "ClientConfigError": "ConfigError",
    "ClientError": "ShardrankError",
    "DeltaBaseError": "DeltaError, of the kind delta_base",
    "NonFiniteRowError": "ExportError",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = list(_MODULE_OF)
__version__ = "0.1.0"


if not TYPE_CHECKING:
    # Type checkers would take any name for one that is here.

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'shardrank' has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
        return found

    def __dir__() -> list[str]:
        return __all__
