"""Tables of the films with every lever, for `FilmsOptions.tables`, with crosses and profile."""

from __future__ import annotations

from typing import Any

EVERY_LEVER: dict[str, dict[str, Any]] = {
    "users": {"blocks": [{"share": 0.3, "dtype": "fp16"}, {"dim": 4, "dtype": "fp32"}]},
    "films": {"dtype": {"hot": "fp32", "cold": "fp16", "hot_share": 0.2}},
    "genres": {"embedding_dim": 4, "project_to": 16},
    "zip_codes": {"num_embeddings": 50},
    "crosses": {
        "num_embeddings": 900,
        "feature_names": ["user_genre", "zip_film"],
        "id_mapping": {"kind": "hash", "salt": "per_feature"},
    },
    "age_genre": {"num_embeddings": 256, "id_mapping": {"kind": "quotient_remainder", "buckets": 16}},
    "occupation_film": {
        "num_embeddings": 1024,
        "id_mapping": {"kind": "quotient_remainder", "buckets": 40, "combine": "multiply"},
    },
}
