"""The in-process call: a model ranked from Python, with no server and nothing serialised.

```python
with Ranker.open("models/films/3") as ranker:
    answer = ranker.rank({"context": {...}, "candidates": {...}, "top_k": 10})
```
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from serving.description import ModelInfo
from serving.formats.json_reader import JsonCodec, encode_request, lookup_pieces, rank_document
from serving.formats.requests import Method, RankResponse
from serving.limits import RequestLimits
from serving.models.layers import DtypeChoice
from serving.rank.service import RankingService, answer_in_thread
from serving.versions.loading import ModelSource, load_served_model
from shard_node.cuda.card_set import CardOptions, CardSet


class Ranker:
    """A model version in this process, with the HTTP API's requests, answers, limits and errors. Thread-safe."""

    def __init__(self, service: RankingService, model: str) -> None:
        self._service = service
        self._model = model

    @classmethod
    def open(
        cls,
        snapshot: str | Path,
        *,
        cards: int = 1,
        device: str = "cpu",
        card_options: CardOptions | None = None,
        dtype: DtypeChoice = "auto",
        num_replicas: int = 1,
        memory_budget_bytes: int | None = None,
        verify: bool = True,
        trust_exported: bool = False,
        limits: RequestLimits | None = None,
    ) -> Ranker:
        """Load a version from its folder and check it against its golden requests.

        Args:
            snapshot: the folder.
            cards: over which the rows are divided.
            device: where rows lie, as `--device` of `shardrank serve` has it.
            card_options: what the rows may take of the cards, if that is not the CPU.
            dtype: of the dense model; `auto` is the fastest that the device has and golden requests bear out.
            num_replicas: ranking replicas, each a thread; on cards they take turns over these.
            memory_budget_bytes: RAM for rows; what does not fit stays in the mapped files, or, with cards, is refused.
                None: all in RAM, or, with cards, as much pinned memory as `card_options` says.
            verify: check every file's SHA-256.
            trust_exported: run an exported program, which is code and can do whatever this process can.
            limits: of requests and batches.

        Raises:
            ShardrankError: as `load_served_model` and `CardSet.open`.
        """
        service = RankingService(limits)
        source = ModelSource(
            snapshot=Path(snapshot),
            cards=cards,
            memory_budget_bytes=memory_budget_bytes,
            card_set=CardSet.open(device, cards, card_options),
            verify=verify,
            trust_exported=trust_exported,
            num_replicas=num_replicas,
            dtype=dtype,
        )
        served = load_served_model(source, service)
        service.install(served)
        return cls(service, served.model)

    @property
    def description(self) -> ModelInfo:
        """What the model takes and is made of."""
        return self._service.describe(self._model)

    def rank(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Rank one request: the body of `POST /v1/models/{model}:rank`, and of its answer. Raises ShardrankError."""
        return self._answer("rank", request)

    def lookup(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Look embeddings up: the body of `POST /v1/models/{model}:lookup`, and of its answer. Raises as `rank`."""
        return self._answer("lookup", request)

    def close(self) -> None:
        """Wait for requests in flight and free everything. Idempotent."""
        self._service.close()

    def _answer(self, method: Method, request: Mapping[str, Any]) -> dict[str, Any]:
        codec = JsonCodec(method, self._model, "embedded")
        answered = answer_in_thread(self._service, codec, encode_request(request))
        if isinstance(answered, RankResponse):
            return rank_document(answered)
        written: dict[str, Any] = msgspec.json.decode(b"".join(lookup_pieces(answered)))
        return written

    def __enter__(self) -> Ranker:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
