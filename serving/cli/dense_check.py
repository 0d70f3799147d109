"""Whether the dense tensors of a checkpoint or a snapshot are those that its typed description asks for."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from loader.errors import CheckpointError
from loader.manifest import ModelSpec
from serving.errors import RankingModelError
from serving.models.factory import build_model, load_model


def check_dense_model(
    spec: ModelSpec, tensors: Mapping[str, torch.Tensor], keys: Collection[str], dense_prefix: str | None = None
) -> None:
    """Builds the dense model from its tensors, as a server will.

    Args:
        spec: the model's description.
        tensors: by the names that the snapshot has, or is to have.
        keys: among which a prefix is looked for when names do not fit: all of the checkpoint, or the snapshot's.
        dense_prefix: the prefix that was cut off.

    Raises:
        CheckpointError: a tensor is missing, unknown, or of another shape or type than the description says. Where all
            missing names are there behind a prefix, the message says which.
    """
    try:
        load_model(spec, tensors)
    except RankingModelError as error:
        raise CheckpointError(f"{error}{suggested_prefix(spec, keys, dense_prefix)}") from error


def suggested_prefix(spec: ModelSpec, keys: Collection[str], dense_prefix: str | None) -> str:
    """The end of a message: which `--dense-prefix` would find every tensor; "" if none would, or it was given."""
    with torch.device("meta"):
        names = list(build_model(spec).state_dict())
    prefixes = set.intersection(*({key[: -len(name)] for key in keys if key.endswith(name)} for name in names))
    fitting = sorted(prefix for prefix in prefixes if prefix != dense_prefix)
    if not fitting or ("" in fitting and dense_prefix is None):
        return ""
    if "" in fitting:
        return "; the names fit without --dense-prefix"
    return f"; the names fit with --dense-prefix {' or '.join(fitting)}"
