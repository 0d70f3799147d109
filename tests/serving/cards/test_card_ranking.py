"""Ranking where rows are on cards gives the scores that ranking on the CPU gives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from loader.registry.fleet import DenseStep
from loader.snapshot.codecs import RowCodec
from loader.snapshot.reader import Snapshot
from serving.limits import RequestLimits
from serving.rank.ranking import Ranking
from serving.versions.loaded_version import LoadedVersion, ranking_parts
from shardrank_testing.card_engines import OnCards, engine_params
from shardrank_testing.card_ranking import (
    DENSE,
    FAR_S,
    ask,
    engine_of,
    num_graphs,
    num_replays,
    ranking_of,
    score,
    scored,
    served_on,
    shop_batch,
    shop_spec,
    write_keyed_shop,
    write_shop,
)
from shardrank_testing.snapshots import random_rows

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
def on_cpu(paths) -> Iterator[dict[str, LoadedVersion]]:
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


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("on", engine_params(ON[1:5], (OnCards(2, "peers", "logical"),)))
def test_tables_with_keys_are_ranked_as_on_the_cpu_while_keys_come_and_go(tmp_path, rng, kind, on):
    path, keys = write_keyed_shop(tmp_path, kind)
    spec = Snapshot.open(path).spec
    with served_on(path, None) as expected, served_on(path, on) as served:
        for _ in range(3):
            for candidates in CANDIDATES:
                batch = shop_batch(served, rng, candidates)
                of_cards, of_cpu = scored(served, batch), scored(expected, batch)
                np.testing.assert_allclose(of_cards.scores, of_cpu.scores, rtol=1e-4, atol=1e-5)
                assert len(of_cpu.missing)
                for name in ("feature", "bag", "id"):
                    assert getattr(of_cards.missing, name).tolist() == getattr(of_cpu.missing, name).tolist()
            for table in (table for table in spec.tables if table.keys):
                upserted = np.sort(rng.permutation(table.num_embeddings)[: table.num_embeddings // 3])
                rows = random_rows(rng, upserted.size, table.embedding_dim)
                columns = np.split(rows, np.cumsum(table.slice_dims)[:-1], axis=1)
                stored = [RowCodec(table.dtype, one.shape[1]).encode(one) for one in columns]
                gone = np.sort(rng.permutation(keys[table.name])[:9])
                for version in (expected, served):
                    engine = engine_of(version)
                    numbers = engine.layout.slices[table.name]
                    engine.update_keys(numbers, upserted, np.concatenate(stored, axis=1))
                    engine.update_keys(numbers, gone, None)
        scorer = ranking_of(served).scorer
        assert (num_graphs(scorer) > 0, num_replays(scorer) > 0) == (True, True)


def test_replicas_are_on_the_cards_in_turn(paths, on_cpu, rng):
    with served_on(paths["dlrm"], OnCards(3, "peers"), num_replicas=4) as served:
        assert [ranking_of(served, replica).scorer.lane.card.number for replica in range(4)] == [0, 1, 2, 0]
        batch = shop_batch(served, rng, [4, 6])
        for replica in range(4):
            np.testing.assert_allclose(score(served, batch, replica), score(on_cpu["dlrm"], batch), rtol=1e-4)


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("on", engine_params((TWO,), (OnCards(2, "peers", "logical"),)))
def test_bfloat16_scores_are_those_of_the_cpu(paths, on_cpu, rng, kind, on):
    with served_on(paths[kind], on) as served:
        parts = ranking_parts(Snapshot.open(paths[kind]), served.schema, "bfloat16")
        for candidates in CANDIDATES * 2:
            batch = shop_batch(served, rng, candidates)

            async def work(ranking: Ranking, batch=batch) -> np.ndarray:
                return (await ranking.with_weights(parts).score(batch, FAR_S))[0]

            of_cards, of_cpu = ask(served.replicas[0], work), ask(on_cpu[kind].replicas[0], work)
            # The same rows, rounded to 8 bits of mantissa at the same places; sums before that in another order.
            np.testing.assert_allclose(of_cards, of_cpu, atol=0.02)
            np.testing.assert_allclose(of_cards, score(on_cpu[kind], batch), atol=0.05)


def test_a_dense_step_has_its_graphs_from_its_first_batch_on(paths, rng):
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


def test_classes_of_one_request_are_warm(paths, rng):
    with served_on(paths["mlp"], TWO, RequestLimits(max_batch_candidates=128)) as served:
        scorer = ranking_of(served).scorer
        assert [one.num_candidates for one in scorer.classes] == [32, 64, 96, 128]
        assert (num_graphs(scorer), num_replays(scorer)) == (4, 0)
        score(served, shop_batch(served, rng, [100], longest=1))
        assert (num_graphs(scorer), num_replays(scorer)) == (4, 1)
