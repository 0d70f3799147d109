"""Both clients by one coroutine, requests in the client's form, and a model whose packed requests look different."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from loader.snapshot.manifest import ModelSpec
from serving.client import AsyncClient, Client
from shardrank_testing.serving_api import api_spec

CLIENTS = (Client, AsyncClient)


class Caller:
    """A client of either kind, called from an event loop."""

    def __init__(self, client: Client | AsyncClient) -> None:
        self.client = client

    async def __call__(self, method: str, *args: Any, **options: Any) -> Any:
        call = getattr(self.client, method)
        if isinstance(self.client, AsyncClient):
            return await call(*args, **options)
        return await asyncio.to_thread(call, *args, **options)


@asynccontextmanager
async def calling(kind: type[Client] | type[AsyncClient], address: str, **options: Any) -> AsyncIterator[Caller]:
    """A client that is closed at the end."""
    client = kind(address, **options)
    try:
        yield Caller(client)
    finally:
        if isinstance(client, AsyncClient):
            await client.close()
        else:
            client.close()


def rank_arguments(request: dict[str, Any]) -> dict[str, Any]:
    """The JSON form of a rank request as arguments of a client's `rank`."""
    context, candidates = request["context"], request["candidates"]
    options = ("timeout_ms", "top_k", "request_id", "routing_key", "version", "max_age_ms", "min_sequence")
    return {
        "context": context["sparse"],
        "candidates": candidates["sparse"],
        "context_dense": context.get("dense"),
        "candidate_dense": candidates.get("dense"),
        "weights": {**context.get("weights", {}), **candidates.get("weights", {})},
        **{name: request[name] for name in options if name in request},
    }


def reordered_spec() -> ModelSpec:
    """The model's spec with two features of one table in the other order: another digest for the same requests."""
    spec, other = api_spec(), {"tag": "liked-tag", "liked-tag": "tag"}
    by_name = {feature.name: feature for feature in spec.features}
    tables = tuple(
        table.model_copy(update={"feature_names": ("liked-tag", "tag")}) if table.name == "tags" else table
        for table in spec.tables
    )
    features = tuple(by_name[other.get(feature.name, feature.name)] for feature in spec.features)
    return spec.model_copy(update={"features": features, "tables": tables})
