"""Ranking where rows are on cards gives the scores that ranking on the CPU gives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from loader.registry.fleet import DenseStep
from loader.snapshot.manifest import DenseInputs, DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.reader import Snapshot
from loader.snapshot.tables import TableSpec
from serving.cards.layout import BatchClass
from serving.limits import RequestLimits
from serving.rank.ranking import Ranking
from serving.versions.served_model import ServedModel, ranking_parts
from shard_node.cuda.batch import GAP_BYTES
from shardrank_testing.card_engines import OnCards, engine_params
from shardrank_testing.card_ranking import (
    DENSE,
    FAR_S,
    ask,
    num_graphs,
    num_replays,
    ranking_of,
    score,
    served_on,
    shop_batch,
    shop_spec,
    write_shop,
)
from shardrank_testing.emulated_cards import EmulatedCards
from shardrank_testing.host_kernels import host_kernels

ON = (
    OnCards(1, "peers"),
    OnCards(3, "peers"),
    OnCards(8, "every tier"),
    OnCards(2, "every tier", "no peer access"),
    OnCards(3, "every tier", "as late as can be"),
    OnCards(2, "peers", "as late as can be"),
)
CANDIDATES = ([5], [1, 7, 3], [40], [9, 1, 1, 1, 20], [2])
TWO = OnCards(2, "peers")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: write_shop(tmp_path_factory.mktemp("store"), shop_spec(kind)) for kind in DENSE}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(scope="module")
def on_cpu(paths) -> Iterator[dict[str, ServedModel]]:
    with ExitStack() as stack:
        yield {kind: stack.enter_context(served_on(path, None)) for kind, path in paths.items()}


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("on", engine_params(ON))
def test_scores_are_those_of_the_cpu_engine_again_and_again(paths, on_cpu, rng, kind, on):
    with served_on(paths[kind], on) as served:
        for _ in range(3):
            for candidates in CANDIDATES:
                batch = shop_batch(served, rng, candidates)
                np.testing.assert_allclose(score(served, batch), score(on_cpu[kind], batch), rtol=1e-4, atol=1e-5)
        scorer = ranking_of(served).scorer
        assert (num_graphs(scorer) > 0, num_replays(scorer) > 0) == (True, True)
        # Sequences are as long as they are: what comes behind pooling is not recorded.
        captured = [one for one in scorer._batches.values() if one.is_captured]
        assert {one.is_graph for one in captured} == {kind != "target_attention"}


def test_replicas_take_turns_over_the_cards_and_all_give_the_same_scores(paths, on_cpu, rng):
    with served_on(paths["dlrm"], OnCards(3, "peers"), num_replicas=4) as served:
        assert [ranking_of(served, replica).scorer.lane.card.number for replica in range(4)] == [0, 1, 2, 0]
        batch = shop_batch(served, rng, [4, 6])
        for replica in range(4):
            np.testing.assert_allclose(score(served, batch, replica), score(on_cpu["dlrm"], batch), rtol=1e-4)


@pytest.mark.parametrize("dense", [(0, 0), (3, 0), (0, 2), (1, 1)])
def test_any_number_of_dense_inputs_has_its_columns(tmp_path, rng, dense):
    kind = "mlp"
    path = write_shop(tmp_path, shop_spec(kind, dense=dense))
    with served_on(path, TWO) as served, served_on(path, None) as reference:
        for candidates in ([3, 4], [3, 4], [1]):
            batch = shop_batch(served, rng, candidates)
            np.testing.assert_allclose(score(served, batch), score(reference, batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("on", engine_params((TWO,), (OnCards(2, "peers", "logical"),)))
def test_in_bfloat16_scores_are_those_of_a_bfloat16_model_on_the_cpu(paths, on_cpu, rng, kind, on):
    with served_on(paths[kind], on) as served:
        parts = ranking_parts(Snapshot.open(paths[kind]), served.schema, "bfloat16")
        for candidates in CANDIDATES * 2:
            batch = shop_batch(served, rng, candidates)

            async def work(ranking: Ranking, batch=batch) -> np.ndarray:
                return (await ranking.using(parts).score(batch, FAR_S))[0]

            of_cards, of_cpu = ask(served._replicas[0], work), ask(on_cpu[kind]._replicas[0], work)
            # The same rows, rounded to 8 bits of mantissa at the same places; sums before that in another order.
            np.testing.assert_allclose(of_cards, of_cpu, atol=0.02)
            np.testing.assert_allclose(of_cards, score(on_cpu[kind], batch), atol=0.05)


@pytest.mark.parametrize("dense", [(0, 13), (13, 7), (1, 0)])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", ["int8", "int4", "fp16"])
def test_pooled_bfloat16_vectors_are_stored_in_pieces_of_16_bytes(tmp_path, rng, dtype, dim, dense):
    sides = {"user": "context", "friend": "context", "film": "candidate", "genre": "candidate", "tag": "candidate"}
    tables = {
        name: TableSpec(name=f"{name}s", num_embeddings=50, embedding_dim=dim, feature_names=(name,), dtype=dtype)
        for name in sides
    }
    spec = ModelSpec(
        model="dlrm",
        tables=tuple(tables.values()),
        features=tuple(FeatureSpec(name=name, side=side) for name, side in sides.items()),
        dense_inputs=DenseInputs(context=dense[0], candidate=dense[1]),
        dense_model=DenseModelSpec(kind="dlrm", config={"bottom_mlp": [8, dim], "top_mlp": [8]}),
    )
    with served_on(write_shop(tmp_path, spec), TWO, dtype="bfloat16") as served:
        batch = shop_batch(served, rng, [3, 4])
        score(served, batch)
        (made,) = (one for one in ranking_of(served).scorer._batches.values() if one.num_uses)
        stores = host_kernels().stores_to(
            made._slot.out.address, made._slot.out.size_bytes, lambda: score(served, batch)
        )
    assert made.num_uses == 2
    assert stores == {16: (2 * 2 + 3 * 7) * dim * 2 // 16}


def test_a_replica_that_goes_on_with_another_dense_model_scores_with_that_one(paths, rng):
    with served_on(paths["mlp"], TWO) as served:
        batch = shop_batch(served, rng, [6])
        before = score(served, batch)
        scorer = ranking_of(served).scorer
        parts = ranking_parts(Snapshot.open(paths["mlp"]), served.schema, "bfloat16")

        async def work(ranking: Ranking) -> None:
            ranking.use(parts)
            ranking.warm(None)

        buffers = set(scorer.classes)
        ask(served._replicas[0], work)
        after = score(served, batch)
        assert (before != after).any()
        np.testing.assert_allclose(after, before, atol=0.05)
        assert set(scorer.classes) <= buffers | {BatchClass.of(6, 1, batch.bags.num_values)}


def test_a_dense_step_answers_by_graphs_from_its_first_batch_on_and_older_ones_leave_nothing(paths, rng):
    snapshot = Snapshot.open(paths["mlp"])
    with served_on(paths["mlp"], TWO, RequestLimits(max_batch_candidates=128)) as served:
        scorer = ranking_of(served).scorer
        batches = [shop_batch(served, rng, candidates) for candidates in ([5], [100], [20, 20])]
        for batch in batches * 2:
            score(served, batch)
        in_use = set(scorer.classes)
        for step in (1, 2, 3):
            tensors = {name: tensor * (1 + step / 100) for name, tensor in snapshot.dense_tensors().items()}
            record = DenseStep(
                model=snapshot.spec.model,
                version=snapshot.version,
                step=step,
                sequence=0,
                sha256="0" * 64,
                size_bytes=1,
                max_drift=1.0,
                published_at=1.0,
            )
            served.change_dense(snapshot, tensors, record, 1.0)
            graphs, replays = num_graphs(scorer), num_replays(scorer)
            for batch in batches:
                score(served, batch)
            assert (num_graphs(scorer), num_replays(scorer)) == (graphs, replays + len(batches))
            # Of the step before, and of this one.
            assert graphs == 2 * len(in_use)
            assert set(scorer.classes) == in_use
            assert len({model for model, _ in scorer._batches}) == 2


def test_a_step_gets_buffers_for_no_more_than_half_of_the_room(paths, rng):
    with served_on(paths["mlp"], TWO, RequestLimits(max_batch_candidates=256)) as served:
        ranking = ranking_of(served)
        ranking.scorer.max_batches = len(ranking.scorer.classes)
        latest = [*ranking.scorer.classes][: -1 - len(ranking.scorer.classes) // 2 : -1]
        parts = ranking_parts(Snapshot.open(paths["mlp"]), served.schema, "float32")

        async def work(ranking: Ranking) -> None:
            await ranking.prepare(parts)

        ask(served._replicas[0], work)
        made = [most for model, most in ranking.scorer._batches if model is ranking._models[parts]]
        assert made == latest
        assert len(ranking.scorer.classes) <= ranking.scorer.max_batches


def test_weights_that_a_batch_leaves_out_are_ones(paths, on_cpu, rng):
    with served_on(paths["mlp"], TWO) as served:
        # The same class of sizes with weights, without, and with: what the last batch had must be gone.
        for weights in (True, False, True, False):
            batch = shop_batch(served, rng, [6, 2], weights=weights)
            assert (batch.bags.weights is None) != weights
            np.testing.assert_allclose(score(served, batch), score(on_cpu["mlp"], batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["mlp", "target_attention"])
def test_requests_without_any_id_are_scored(paths, on_cpu, rng, kind):
    with served_on(paths[kind], TWO) as served:
        for _ in range(2):
            batch = shop_batch(served, rng, [3, 2], longest=0)
            assert batch.bags.num_values == 0
            np.testing.assert_allclose(score(served, batch), score(on_cpu[kind], batch), rtol=1e-4, atol=1e-5)


def test_a_batch_beyond_the_limits_is_scored_without_a_graph(paths, on_cpu, rng):
    limits = RequestLimits(max_batch_candidates=32, max_batch_ids=4096)
    with served_on(paths["dlrm"], TWO, limits) as served:
        scorer = ranking_of(served).scorer
        graphs = num_graphs(scorer)
        for candidates, longest in (([300], 2), ([300], 2), ([30], 900), ([30], 900)):
            batch = shop_batch(served, rng, candidates, longest=longest)
            # A score is a sigmoid of logits that grow with the bags, and float32 sums of a thousand rows differ.
            np.testing.assert_allclose(score(served, batch), score(on_cpu["dlrm"], batch), rtol=1e-3, atol=1e-4)
        assert num_graphs(scorer) == graphs
        assert scorer.classes[-2].num_candidates == 320


def test_the_classes_of_one_request_are_warm_before_the_first_one_comes(paths, rng):
    with served_on(paths["mlp"], TWO, RequestLimits(max_batch_candidates=128)) as served:
        scorer = ranking_of(served).scorer
        assert [one.num_candidates for one in scorer.classes] == [32, 64, 96, 128]
        assert (num_graphs(scorer), num_replays(scorer)) == (4, 0)
        score(served, shop_batch(served, rng, [100], longest=1))
        assert (num_graphs(scorer), num_replays(scorer)) == (4, 1)


@pytest.mark.parametrize("kind", ["mlp", "target_attention"])
def test_a_batch_sends_up_what_it_takes_of_its_classs_buffers(paths, on_cpu, rng, kind):
    with served_on(paths[kind], TWO, RequestLimits(max_batch_candidates=2048)) as served:
        scorer = ranking_of(served).scorer
        cards = scorer.engine.card_set.cards
        assert isinstance(cards, EmulatedCards)
        for longest in (6, 4):
            batch = shop_batch(served, rng, [2000], longest=longest)
            most = BatchClass.of(2000, 1, batch.bags.num_values)
            for is_graph in (False, True, True):
                scorer.use_graphs = is_graph
                cards.bytes_up.clear()
                np.testing.assert_allclose(score(served, batch), score(on_cpu[kind], batch), rtol=1e-4, atol=1e-5)
                assert scorer.classes[-1] == most == BatchClass(2048, 1, 32768)
                buffers = next(reversed(scorer._batches.values()))
                # Ids and weights that there is room for, and that do not come, are not sent.
                left_out = 8 * (most.num_values - batch.bags.num_values)
                assert sum(cards.bytes_up) <= buffers._slot.batch.size_bytes - left_out + GAP_BYTES
                assert len(cards.bytes_up) <= 2
            assert buffers.is_captured


def test_graphs_can_be_left_out(paths, on_cpu, rng):
    with served_on(paths["mlp"], TWO) as served:
        ranking_of(served).scorer.use_graphs = False
        before = num_graphs(ranking_of(served).scorer)
        for _ in range(3):
            batch = shop_batch(served, rng, [3, 9, 1])
            np.testing.assert_allclose(score(served, batch), score(on_cpu["mlp"], batch), rtol=1e-4, atol=1e-5)
        assert num_graphs(ranking_of(served).scorer) == before


def test_buffers_of_classes_that_are_not_used_are_given_up(paths, on_cpu, rng):
    with served_on(paths["mlp"], TWO, RequestLimits(max_batch_candidates=256)) as served:
        scorer = ranking_of(served).scorer
        scorer.max_batches = 3
        for candidates in ([1, 1], [40], [80], [120], [1], [200], [250], [1], [40]):
            batch = shop_batch(served, rng, candidates)
            np.testing.assert_allclose(score(served, batch), score(on_cpu["mlp"], batch), rtol=1e-4, atol=1e-5)
            assert len(scorer.classes) <= 3
            assert scorer.classes[-1] == BatchClass.of(sum(candidates), len(candidates), batch.bags.num_values)
        scorer.max_bytes = 1
        batch = shop_batch(served, rng, [1, 2])
        np.testing.assert_allclose(score(served, batch), score(on_cpu["mlp"], batch), rtol=1e-4, atol=1e-5)
        assert len(scorer.classes) == 1
