"""A model description in a file: what a person writes, read with every mistake named."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loader.manifest import ModelSpec

MAX_DESCRIPTION_BYTES = 16 << 20


def read_description(path: Path) -> ModelSpec:
    """The model that a JSON file describes. Raises ExportError naming each field that is wrong."""
    from pydantic import ValidationError

    from loader.errors import ExportError
    from loader.manifest import ModelSpec, schema_errors
    from serving.models.config import parse_dense_model

    if (size := path.stat().st_size) > MAX_DESCRIPTION_BYTES:
        raise ExportError(f"{path}: {size} bytes, at most {MAX_DESCRIPTION_BYTES} are read")
    try:
        spec = ModelSpec.model_validate_json(path.read_bytes(), strict=True)
    except ValidationError as error:
        raise ExportError(f"{path}: {'; '.join(map(str, schema_errors(error, [ModelSpec])))}") from error
    parse_dense_model(spec)
    return spec
