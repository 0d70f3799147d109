"""Dense weights that change between snapshots: files in `<store>/<model>/dense-steps/<version>/`. See docs/deltas.md.

A step is a safetensors file with the names and shapes of the version's dense tensors. Its name has the step and the
beginning of its SHA-256, so that no other content ever gets it. The registry's `DenseStep` names the newest step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from loader.errors import DeltaError, DeltaFormatError
from loader.registry.fleet import DenseStep
from loader.snapshot.manifest import MAX_DENSE_BYTES, ExportedModelSpec
from loader.snapshot.reader import Snapshot
from loader.snapshot.store import Store

KEPT_STEPS: Final = 4
"""Files of a version that stay: a process may still be reading one that is not the newest."""
DEFAULT_MAX_DRIFT: Final = 0.25


def steps_folder(model: str, version: int) -> str:
    """Locate the files of a version's steps in the store."""
    return f"{model}/dense-steps/{version}"


def _file_name(step: int, sha256: str) -> str:
    return f"{step:020d}-{sha256[:16]}.safetensors"


def checked_tensors(snapshot: Snapshot, tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return arrays or tensors of any device as a version's dense tensors, in memory.

    Raises DeltaFormatError if names or shapes are not those of the version, or a value is not finite, DeltaError if the
    version's dense model is an exported program, which has its weights itself.
    """
    what = f"dense weights of {snapshot.spec.model!r} version {snapshot.version}"
    if isinstance(snapshot.spec.dense_model, ExportedModelSpec):
        raise DeltaError(f"{what}: it is an exported program, which has its weights itself: publish a version")
    expected_by_name = snapshot.dense_tensors()
    if missing := sorted(expected_by_name.keys() - tensors.keys()):
        raise DeltaFormatError(f"{what}: missing tensors: {missing}")
    if unknown := sorted(tensors.keys() - expected_by_name.keys()):
        raise DeltaFormatError(f"{what}: unknown tensors: {unknown}; it has: {sorted(expected_by_name)}")
    checked = {}
    for name, expected in expected_by_name.items():
        given = tensors[name]
        tensor = given.detach() if isinstance(given, torch.Tensor) else torch.from_numpy(np.asarray(given))
        if tensor.shape != expected.shape:
            shapes = f"{list(tensor.shape)}, not {list(expected.shape)}"
            raise DeltaFormatError(f"{what}: tensor {name!r} has shape {shapes}")
        if tensor.is_floating_point() != expected.is_floating_point():
            raise DeltaFormatError(f"{what}: tensor {name!r} is {tensor.dtype}, the version has {expected.dtype}")
        checked[name] = tensor.to(device="cpu", dtype=expected.dtype).contiguous()
        if not bool(torch.isfinite(checked[name]).all()):
            raise DeltaFormatError(f"{what}: tensor {name!r} holds NaN or inf")
    return checked


def write_step(
    store: Store,
    model: str,
    version: int,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    accepted: DenseStep | None = None,
) -> tuple[str, int]:
    """Write a step's file durably, and drop all but the last few and the `accepted` one.

    Returns SHA-256 (hex) and size in bytes. Raises SnapshotError if the store can't be written; StoreError.
    """
    content = save(dict(tensors))
    sha256 = hashlib.sha256(content).hexdigest()
    folder = steps_folder(model, version)
    path = f"{folder}/{_file_name(step, sha256)}"
    kept = {path} if accepted is None else {path, f"{folder}/{_file_name(accepted.step, accepted.sha256)}"}
    store.write_file(path, content)
    # By age: of an earlier fleet that used this store there may be steps of higher numbers.
    others = sorted((-age_s, file) for file, age_s in store.list_files(folder).items() if file not in kept)
    store.delete_files([old for _, old in others[: 1 - KEPT_STEPS]])
    return sha256, len(content)


def read_step(store: Store, record: DenseStep) -> dict[str, torch.Tensor]:
    """Read a step's tensors.

    Raises SnapshotError if the file can't be read, DeltaFormatError if it is not what was published; StoreError.
    """
    path = f"{steps_folder(record.model, record.version)}/{_file_name(record.step, record.sha256)}"
    if record.size_bytes > 2 * MAX_DENSE_BYTES:
        raise DeltaFormatError(f"{path}: {record.size_bytes} bytes, at most {2 * MAX_DENSE_BYTES} are read")
    content = store.read_file(path, 2 * MAX_DENSE_BYTES)
    path, sha256 = f"{store.name}/{path}", hashlib.sha256(content).hexdigest()
    if len(content) != record.size_bytes or sha256 != record.sha256:
        stated = f"published were {record.size_bytes} of {record.sha256}"
        raise DeltaFormatError(f"{path}: {len(content)} bytes of SHA-256 {sha256}; {stated}")
    try:
        return load(content)
    except (SafetensorError, KeyError, TypeError) as error:  # a dtype or a shape that torch has not
        raise DeltaFormatError(f"{path}: {error}") from error
