"""A process whose cards have failed says so, stops being ready, and ends, so that a new one takes its place."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from serving.cards.ranking import MAX_FAILED_CAPTURES
from serving.config import ServeConfig
from serving.limits import RequestLimits
from serving.rank.ranking import Ranking
from serving.rank.service import RankingService
from serving.server import serve
from shard_node.cuda.card_set import CardSet
from shard_node.errors import CardError, MemoryBudgetError
from shardrank_testing.card_engines import OnCards, options_for
from shardrank_testing.card_ranking import (
    ask,
    num_graphs,
    ranking_of,
    score,
    served_on,
    shop_batch,
    shop_spec,
    write_shop,
)
from shardrank_testing.emulated_cards import EmulatedCards
from shardrank_testing.serving_api import MODEL, ApiModel, api_request, running_api, served_service

FAULT = "device 1: waiting for a stream: cudaErrorIllegalAddress: an illegal memory access was encountered"


def on_cards(model: ApiModel) -> tuple[RankingService, EmulatedCards]:
    cards = EmulatedCards(2)
    card_set = CardSet(cards, options_for(model.spec, 2, "peers"))
    return served_service(model, RequestLimits(max_batch_candidates=64), cards=2, card_set=card_set), cards


async def test_a_process_with_failed_cards_is_not_ready(api_model):
    service, cards = on_cards(api_model)
    async with running_api(service) as api:
        assert (await api.http.get("/readyz")).status_code == 200
        cards.fault = FAULT
        answer = await api.http.post(f"/v1/models/{MODEL}:rank", json=api_request(1))
        assert (answer.status_code, answer.json()["error"]["kind"]) == (500, "card")
        for _ in range(2):
            await service.watch.refresh()
            answer = await api.http.get("/readyz")
            assert (answer.status_code, list(answer.json()["problems"].values())) == (503, [f"card: {FAULT}"])
        # What a card does not get over can't pass away, whatever it answers later.
        cards.fault = ""
        await service.watch.refresh()
        assert service.watch.problems() == {"": f"card: {FAULT}"}
        with pytest.raises(CardError, match="cudaErrorIllegalAddress"):
            await service.watch.cards_failed()
    await asyncio.to_thread(service.close)


async def test_a_serving_process_ends_with_the_error_of_its_cards(api_model):
    service, cards = on_cards(api_model)
    ready = asyncio.Event()

    async def load() -> None:
        pass

    config = ServeConfig(http_port=0, grpc_port=0, shutdown_delay_s=0)
    serving = asyncio.create_task(serve(service, config, load, lambda listening: ready.set()))
    await ready.wait()
    cards.fault = FAULT
    for _ in range(2):
        await service.watch.refresh()
    with pytest.raises(CardError, match="cudaErrorIllegalAddress"):
        await serving


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shop(tmp_path_factory.mktemp("shop"), shop_spec("dlrm"))


def test_after_too_many_failures_nothing_is_recorded_any_more(shop, monkeypatch, caplog):
    rng, limits = np.random.default_rng(0), RequestLimits(max_batch_candidates=512)
    with served_on(shop, OnCards(2, "peers"), limits) as served, served_on(shop, None) as reference:
        ranking = ranking_of(served)
        capture, before = ranking.scorer.lane.card.capture, num_graphs(ranking.scorer)

        def broken(stream, work):
            capture(stream, work)
            raise CardError("a graph can't be captured: cudaErrorStreamCaptureInvalidated")

        monkeypatch.setattr(ranking.scorer.lane.card, "capture", broken)
        for candidates in (64, 96, 128, 160, 192, 224, 256, 320, 384, 448):
            batch = shop_batch(served, rng, [candidates - 1, 1], longest=2)
            for _ in range(2):
                np.testing.assert_allclose(score(served, batch), score(reference, batch), rtol=1e-4, atol=1e-5)
        assert (num_graphs(ranking.scorer), ranking.scorer.failed_captures) == (before, MAX_FAILED_CAPTURES)
        assert "and so are all that come from now on" in caplog.text


def test_a_version_is_warm_as_far_as_its_dense_model_has_room(shop, monkeypatch, caplog):
    with served_on(shop, OnCards(2, "peers"), RequestLimits(max_batch_candidates=256)) as served:
        ranking = ranking_of(served)
        model, room = ranking._on_card(ranking.parts).model, 96
        forward = model.forward

        def forward_with_room(inputs):
            if inputs.candidates.shape[0] > room:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return forward(inputs)

        async def warm(ranking: Ranking) -> None:
            while ranking.scorer._batches:
                ranking.scorer._batches.popitem()[1].free()
            await ranking.warm(None)

        monkeypatch.setattr(model, "forward", forward_with_room)
        ask(served.replicas[0], warm)
        assert [one.num_candidates for one in ranking.scorer.classes] == [32, 64, 96]
        assert "no room is reserved for batches of 128 candidates and more: card 0 has no room" in caplog.text
        room = 0
        with pytest.raises(MemoryBudgetError, match="dense model's work on 32 candidates"):
            ask(served.replicas[0], warm)
