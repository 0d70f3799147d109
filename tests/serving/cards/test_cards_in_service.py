"""A service whose rows are on cards keeps what it promises: errors, deltas, swaps, metrics, no leak."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from loader.deltas.publisher import AsyncDeltaPublisher
from loader.snapshot.codecs import RowCodec
from serving.embedded import Ranker
from serving.limits import RequestLimits
from serving.rank.service import RankingService
from shard_node.cuda.card_set import CardOptions, CardSet
from shard_node.errors import MemoryBudgetError
from shardrank_testing.agent_fleet import agent_fleet, with_live
from shardrank_testing.card_engines import OnCards, engine_params
from shardrank_testing.card_ranking import ranking_of, score, served_on, shop_batch, shop_spec, write_shop
from shardrank_testing.emulated_cards import EmulatedCards
from shardrank_testing.errors import raises_kind
from shardrank_testing.serving_api import (
    FILMS,
    MODEL,
    ApiModel,
    api_request,
    served_service,
)

LIMITS = RequestLimits(max_batch_candidates=64)
ON = (OnCards(2, "peers"), OnCards(3, "every tier"))


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> Path:
    return write_shop(tmp_path_factory.mktemp("shop"), shop_spec("dlrm"))


def on_service(on: OnCards, model: ApiModel, **options) -> RankingService:
    return served_service(model, LIMITS, cards=on.num_cards, card_set=on.card_set(model.spec), **options)


def on_cards(on: OnCards, model: ApiModel, **options) -> Ranker:
    return Ranker(on_service(on, model, **options))


@pytest.mark.parametrize("on", engine_params(ON))
def test_requests_are_ranked_and_looked_up_as_they_must_be(api_model, api_service, on):
    names = {"film": [[1, 2], []], "genre": [[3], [4, 18]], "history": [[5, 6, 7], []]}
    with on_cards(on, api_model, num_replicas=2) as ranker:
        for seed in range(6):
            request = api_request(seed, 3 + seed)
            np.testing.assert_allclose(ranker.rank(MODEL, **request).scores, api_model.scores(request), rtol=1e-4)
        wrong = api_request(0)
        wrong["candidates"]["sparse"]["film"][1] = FILMS + 5
        with raises_kind("unknown_id", match=rf"candidates.sparse.film\[1\].*{FILMS + 5} has no row"):
            ranker.rank(MODEL, **wrong)
        looked_up = ranker.lookup(MODEL, names).embeddings
    expected = Ranker(api_service).lookup(MODEL, names).embeddings
    for name in names:
        found, right = (getattr(rows[name], "values", rows[name]) for rows in (looked_up, expected))
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("on", "peer_access"), [(ON[1], 1.0), (OnCards(2, "every tier", "no peer access"), 0.0)])
async def test_metrics_name_tiers_and_peer_access(api_model, on, peer_access):
    service = on_service(on, api_model)
    await asyncio.to_thread(Ranker(service).rank, MODEL, **api_request(1))
    await service.watch.refresh()
    samples = [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(service.metrics.render().decode())
        for sample in family.samples
    ]
    await asyncio.to_thread(service.close)

    def values(of: str, label: str = "version") -> dict[str, float]:
        return {labels[label]: value for name, labels, value in samples if name == of}

    memory = values("shardrank_memory_bytes", "tier")
    assert memory.keys() >= {"card", "hot", "pinned"}
    assert all(size > 0 for size in memory.values())
    assert values("shardrank_cards_peer_access") == {"1": peer_access}
    assert values("shardrank_card_bad_values_total", "reason") == {"outside_table": 0.0, "not_here": 0.0}
    assert "card" in values("shardrank_rows_looked_up_total", "tier")
    # Sequences are as long as they are: their batches have no graph.
    assert values("shardrank_card_batches_total", "how")["launches"] == 1.0


@pytest.mark.parametrize("on", engine_params((OnCards(3, "peers"), OnCards(3, "peers", "as late as can be"), ON[1])))
def test_a_batch_sees_all_rows_of_a_write_or_none(shop, on):
    """Two states of a whole table in turn, while two replicas rank: every batch has the scores of one of them."""
    rng = np.random.default_rng(0)
    with served_on(shop, on, num_replicas=2) as served:
        engine = ranking_of(served).scorer.engine
        table = engine.layout.index["films"]
        rows, codec = np.arange(engine.layout.tables[table].num_embeddings), RowCodec("int8", 8)
        states = [codec.encode(np.full((rows.size, 8), value, np.float32)) for value in (1.0, -2.0)]
        batch = shop_batch(served, rng, [7, 4])
        expected = []
        for stored in states:
            engine.write_rows(table, rows, stored)
            expected.append(score(served, batch))
        assert np.abs(expected[0] - expected[1]).max() > 1e-3
        ended = threading.Event()

        def write() -> None:
            for stored in itertools.cycle(states):
                if ended.is_set():
                    return
                engine.write_rows(table, rows, stored)

        writer = threading.Thread(target=write)
        writer.start()
        try:
            found = [score(served, batch, number % 2) for number in range(60)]
        finally:
            ended.set()
            writer.join()
    for scores in found:
        assert any(np.allclose(scores, one, rtol=1e-5, atol=1e-6) for one in expected)


def test_only_a_batch_without_room_on_the_card_is_refused(shop):
    rng = np.random.default_rng(0)
    with served_on(shop, None) as reference:
        small, large = shop_batch(reference, rng, [20]), shop_batch(reference, rng, [4000])
        expected = score(reference, small)
    card_set = CardSet(EmulatedCards(1), CardOptions(card_memory_gb=1e-3))
    card = card_set.cards.cards[0]
    with served_on(shop, None, card_set=card_set) as served:
        scorer = ranking_of(served).scorer
        in_the_way = card.allocate(card.free_bytes() - (1 << 20))
        with pytest.raises(MemoryBudgetError):
            score(served, large)
        assert scorer.classes == []
        np.testing.assert_allclose(score(served, small), expected, rtol=2e-5)
        in_the_way.free()


@pytest.mark.nightly
async def test_versions_are_swapped_and_deltas_applied_on_cards(versions, store, folder):
    """While requests are answered; what goes leaves no memory behind."""
    cards = EmulatedCards(2)
    free = [card.free_bytes() for card in cards.cards]
    requests = [api_request(seed) for seed in range(4)]
    answered: Counter[int] = Counter()
    is_over = False

    async with agent_fleet(folder, store, shards=1, replicas=0) as fleet:
        card_set = CardSet(cards, CardOptions(card_memory_gb=1e-3))
        node, service = await with_live(fleet, versions, local=True, limits=LIMITS, card_set=card_set)
        ranker = Ranker(service)

        async def load() -> None:
            for request in itertools.cycle(requests):
                answer = await asyncio.to_thread(ranker.rank, MODEL, **request)
                np.testing.assert_allclose(answer.scores, versions[answer.version].scores(request), rtol=1e-4)
                answered[answer.version] += 1
                if is_over:
                    return

        async with asyncio.TaskGroup() as loads:
            for _ in range(2):
                loads.create_task(load())
            await fleet.want(MODEL, hold=(1, 2), serve=(1, 2))
            await fleet.until_state("serve-0", MODEL, 2, "ready")
            await fleet.want(MODEL, live=2)
            await fleet.until("serve-0", lambda node: node.live.get(MODEL) == 2)
            await fleet.want(MODEL, hold=(2,), serve=(2,), follow=(2,))
            await fleet.until_state("serve-0", MODEL, 1, None)
            is_over = True
        assert answered[1]
        assert answered[2]
        publisher = AsyncDeltaPublisher(fleet.fleet.registry, MODEL, 2)
        await publisher.open()
        values = np.full((FILMS, 8), 3.0, np.float32)
        sequence = await publisher.publish("films", np.arange(FILMS), values)
        await fleet.until("serve-0", lambda node: node.report(MODEL, 2).delta_sequence == sequence)
        answer = await asyncio.to_thread(ranker.rank, MODEL, **requests[0])
        model = versions[2]
        changed = ApiModel(model.path, model.spec, {**model.tables, "films": values}, model.tensors)
        np.testing.assert_allclose(answer.scores, changed.scores(requests[0]), rtol=1e-4)
    # A process that leaves ends with its rows; this one goes on.
    await asyncio.to_thread(node._local.node.close)
    assert [card.free_bytes() for card in cards.cards] == free
