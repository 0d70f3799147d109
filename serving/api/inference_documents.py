"""What the protocol tells of the server and its models: as JSON, and with the same fields as messages."""

from __future__ import annotations

from importlib.metadata import version as package_version
from typing import Any

from serving.formats.infer import parse_version
from serving.formats.schema import OUTPUTS, TensorSpec
from serving.rank.service import RankingService
from serving.versions.served_model import ServedModel
from shard_node.generation import Generation

SERVER_NAME = "shardrank"
EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "parameters", "statistics")
PLATFORM = "shardrank"

# https://github.com/triton-inference-server/common/blob/main/protobuf/model_config.proto
_CONFIG_TYPES = {"INT64": "TYPE_INT64", "INT32": "TYPE_INT32", "FP32": "TYPE_FP32", "BYTES": "TYPE_STRING"}
_READY_STATES = ("live", "staged")

Document = dict[str, Any]


def server_metadata() -> Document:
    """Name, version and extensions of the server."""
    return {"name": SERVER_NAME, "version": package_version("shardrank"), "extensions": list(EXTENSIONS)}


def model_metadata(service: RankingService, model: str, version: str) -> Document:
    """Inputs and outputs of a model version; the live one for "".

    Raises ModelNotFoundError and NotReadyError as `RankingService.lease`, InvalidFieldError for a version that is no
    positive integer, and AmbiguousInputsError if the model can't be called by this protocol.
    """
    inputs = _inputs(service, model, version)
    return {
        "name": model,
        "versions": [str(one.version) for one in _generations(service) if one.model == model],
        "platform": PLATFORM,
        "inputs": [_tensor(one) for one in inputs],
        "outputs": [_tensor(one) for one in OUTPUTS],
    }


def model_config(service: RankingService, model: str, version: str) -> Document:
    """The configuration of a model version, as far as a ranking model has one. Raises as `model_metadata`."""
    inputs = _inputs(service, model, version)
    return {
        "name": model,
        "platform": PLATFORM,
        "backend": SERVER_NAME,
        # Requests are joined by this server's own batcher, whatever their shapes; clients don't batch for it.
        "max_batch_size": 0,
        "input": [_configured(one) | ({"optional": True} if one.optional else {}) for one in inputs],
        "output": [_configured(one) for one in OUTPUTS],
        "model_transaction_policy": {"decoupled": False},
    }


def model_is_ready(service: RankingService, model: str, version: str) -> bool:
    """Whether a version (the live one for "") would answer a request now. Raises InvalidFieldError for a wrong one."""
    wanted, problems = parse_version(version), service.watch.problems()
    if "" in problems or model in problems:
        return False
    here = [one for one in _generations(service) if one.model == model]
    return any(one.state == "live" if wanted is None else one.version == wanted for one in here)


def model_statistics(service: RankingService, model: str, version: str) -> Document:
    """Counts and times of versions since they are here, in this process; "" for all. Raises as `model_metadata`."""
    wanted = parse_version(version)
    chosen = [
        one for one in _generations(service) if model in ("", one.model) and (wanted is None or one.version == wanted)
    ]
    if not chosen and model:
        # Says what is served instead.
        service.lease(model, wanted).release()
    clock_zero_s = service.wall_clock() - service.clock()
    return {"model_stats": [_statistics(one, clock_zero_s) for one in chosen]}


def repository_index(service: RankingService, *, ready_only: bool) -> list[Document]:
    """All versions that are here, by model; those that drain are not ready, and models without a version have none."""
    index = []
    for one in _generations(service, ("live", "staged", "draining")):
        is_ready = one.state in _READY_STATES
        if is_ready or not ready_only:
            state = {"name": one.model, "version": str(one.version), "state": "READY" if is_ready else "UNAVAILABLE"}
            index.append(state | {"reason": "" if is_ready else "it was withdrawn and drains"})
    for model, problem in service.watch.problems().items():
        if model and not ready_only and all(one["name"] != model for one in index):
            index.append({"name": model, "version": "", "state": "UNAVAILABLE", "reason": problem})
    return index


def _generations(service: RankingService, states: tuple[str, ...] = _READY_STATES) -> list[Generation[ServedModel]]:
    found = [one for one in service.generations.all() if one.state in states]
    return sorted(found, key=lambda one: (one.model, one.version))


def _inputs(service: RankingService, model: str, version: str) -> list[TensorSpec]:
    with service.lease(model, parse_version(version)) as lease:
        return list(lease.payload.schema.inputs.values())


def _tensor(spec: TensorSpec) -> Document:
    return {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}


def _configured(spec: TensorSpec) -> Document:
    return {"name": spec.name, "data_type": _CONFIG_TYPES[spec.datatype], "dims": list(spec.shape)}


def _statistics(generation: Generation[ServedModel], clock_zero_s: float) -> Document:
    totals = generation.payload.counter.totals()
    durations = {
        "success": (totals.succeeded, totals.succeeded_s),
        "fail": (totals.failed, totals.failed_s),
        "queue": (totals.succeeded, totals.queue_s),
        "compute_input": (totals.succeeded, totals.input_s),
        "compute_infer": (totals.succeeded, totals.infer_s),
        "compute_output": (totals.succeeded, totals.output_s),
        "cache_hit": (0, 0.0),
        "cache_miss": (0, 0.0),
    }
    return {
        "name": generation.model,
        "version": str(generation.version),
        "last_inference": 0 if totals.last is None else round(1000 * (clock_zero_s + totals.last)),
        "inference_count": totals.succeeded,
        "execution_count": round(totals.batches),
        "inference_stats": {name: {"count": count, "ns": round(1e9 * s)} for name, (count, s) in durations.items()},
        "batch_stats": [],
    }
