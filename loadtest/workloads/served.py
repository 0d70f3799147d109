"""What load tests ask of a model that a server has: requests drawn from its description, or from a file."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from google.protobuf.json_format import MessageToDict

from loader.errors import ConfigError
from loader.snapshot.manifest import ModelSpec
from router.feature_schema import FeatureSchema
from serving.client import Client
from serving.description import ModelInfo
from serving.errors import InvalidRequestError
from serving.formats.json_reader import JsonCodec
from serving.formats.requests import RankRequest
from serving.formats.schema import RequestSchema
from serving.observe.recording import last_requests

MAX_REQUESTS, MAX_BYTES = 10_000, 512 << 20
"""Of recorded requests that are sent: the last ones, and those whose bodies have no more bytes."""


def describe(target: str, model: str) -> ModelInfo:
    """Return what a server says of a model's live version. Raises ShardrankError: it does not answer, or has none."""
    with Client(target, timeout_ms=10_000) as client:
        message = client.describe(model)
    document = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return ModelInfo.model_validate(document)


def described_spec(described: ModelInfo) -> ModelSpec:
    """Return a model that takes the same requests as one that a server has, packed ones too; its rows are made up."""
    num_rows = {table.name: table.num_embeddings for table in described.tables}
    document = {
        "model": described.model,
        # Tables of one width stay in this order, and so do their features: that of the server's packed requests.
        "tables": [
            {
                "name": name,
                "num_embeddings": num_rows[name],
                "embedding_dim": 1,
                "feature_names": [feature.name for feature in described.features if feature.table == name],
                "id_mapping": {"kind": "vocabulary", "id_type": id_type},
            }
            for name, id_type in dict.fromkeys((feature.table, feature.id_type) for feature in described.features)
        ],
        "features": [each.model_dump(include={"name", "side", "pooling", "weighted"}) for each in described.features],
        "dense_inputs": described.dense_inputs,
        "dense_model": {"kind": "mlp"},
    }
    return ModelSpec.model_validate(document)


def requests_like(path: Path, described: ModelInfo) -> tuple[FeatureSchema, list[RankRequest]]:
    """Read the requests of a file, or of a folder of `--record`, to a model; with the schema that they are made for.

    A file has a recorded request in each line, or a JSON request of the API; blank lines are passed over. Raises
    ConfigError: there is none that fits the model, or a line is no request to it.
    """
    schema = RequestSchema(FeatureSchema.of(described_spec(described)), described.limits)
    lines = [] if path.is_dir() else path.read_bytes().splitlines()
    requests = list[RankRequest]()
    if not lines or b'"schema_digest"' in lines[0]:
        requests, lines = last_requests(path, schema, MAX_REQUESTS, MAX_BYTES), []
    numbered = ((number, text) for number, text in enumerate(lines, 1) if text.strip())
    for number, text in islice(numbered, MAX_REQUESTS):
        try:
            request = JsonCodec(model=described.model).read(text, described.limits).parse(schema)
        except InvalidRequestError as error:
            raise ConfigError(f"--like {path}: line {number} is no JSON request on one line: {error}") from error
        assert isinstance(request, RankRequest)
        requests.append(request)
    if not requests:
        problem = f"no requests to {described.model!r} with the features of version {described.version}"
        raise ConfigError(f"--like {path}: {problem}")
    return schema.features, requests
