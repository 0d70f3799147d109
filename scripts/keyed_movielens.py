#!/usr/bin/env python3
"""Measures keyed tables against hashing on MovieLens 100K in order of time, and prints AUC and bytes as JSON.

Ratings come in blocks; each block is scored before it is trained on, from the second tenth on. Scores are of what would
be served: int8 rows as they are stored, and dense weights, both of the block before. With the first seed, the variant
that forgets keys is served, too: by two shards that get keys, deletions and dense weights after each block.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from anyio.from_thread import start_blocking_portal
from torch.nn import functional as F  # noqa: N812

from loader.snapshot.buckets import starts_of
from loader.snapshot.codecs import RowCodec
from loader.snapshot.manifest import DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.row_source import ArrayRows
from loader.snapshot.tables import TableSpec
from router.id_mapping import hashed_rows
from serving.demo import url_of
from serving.fleet.config import FleetConfig
from serving.fleet.local_fleet import running_fleet
from serving.training.dataset import LIKED_RATING, Interactions, positions_in, read_movielens
from serving.training.network import RankingNetwork, RowBatch
from serving.training.trainer import auc
from shard_node.bags import Float32Array, Int64Array
from shardrank import Client, DeltaPublisher, export_snapshot

MODEL, DIM, SAMPLES_PER_STEP, PASSES = "films", 16, 250, 2
ROW_RATE, ROW_ACCUMULATOR, DENSE_RATE = 0.2, 0.1, 0.003
CODEC = RowCodec("int8", DIM)
# Of a key in the index of a table that is at its capacity.
INDEX_BYTES = 20
ANSWER_TIMEOUT_S = 60.0
# What is compared is what was published, not how it is computed.
FLOAT32 = {"dtype": "float32", "wire_dtype": "float32"}


class KeyedRows:
    """Rows that ids get when they are first learnt and lose after `forget_after` blocks without; others have row 0.

    With `frozen` no id gets one after the first tenth, and row 0 is trained by such ids, as a vocabulary's default row.
    """

    def __init__(self, num_ids: int, forget_after: int | None = None, *, frozen: bool = False) -> None:
        self.num_rows, self.forget_after, self.frozen, self.is_scored = num_ids + 1, forget_after, frozen, False
        self.row_of, self.last_block, self.free = dict[int, int](), dict[int, int](), [*range(num_ids, 0, -1)]
        self.num_bytes = 0

    def find(self, ids: Int64Array) -> Int64Array:
        """Return the row of each id."""
        return np.array([self.row_of.get(key, 0) for key in ids.tolist()], np.int64)

    def learn(self, ids: Int64Array, block: int) -> Int64Array:
        """Give those ids rows that have none; return these rows."""
        keys = [] if self.frozen and self.is_scored else np.unique(ids).tolist()
        new = [key for key in keys if key not in self.row_of]
        self.row_of |= {key: self.free.pop() for key in new}
        self.last_block |= dict.fromkeys(keys, block)
        self.num_bytes = max(self.num_bytes, len(self.row_of) * (CODEC.row_bytes + INDEX_BYTES))
        return self.find(np.array(new, np.int64))

    def forget(self, block: int) -> Int64Array:
        """Take rows from ids that were not learnt for too long; return these ids."""
        since = -1 if self.forget_after is None else block - self.forget_after
        gone = [key for key, last in self.last_block.items() if last <= since]
        self.free += [self.row_of.pop(key) for key in gone]
        self.last_block = {key: last for key, last in self.last_block.items() if last > since}
        return np.array(gone, np.int64)


class HashedRows(KeyedRows):
    """Rows that ids have by their hash, or by their number."""

    def __init__(self, num_rows: int, *, by_number: bool = False) -> None:
        super().__init__(0)
        self.num_rows, self.by_number, self.num_bytes = num_rows, by_number, num_rows * CODEC.row_bytes

    def find(self, ids: Int64Array) -> Int64Array:
        """Return the row of each id."""
        return ids - 1 if self.by_number else hashed_rows(ids, np.ones(1, np.uint64), np.full(1, self.num_rows, "u8"))

    def learn(self, ids: Int64Array, block: int) -> Int64Array:
        """Return no rows: ids have theirs."""
        return np.zeros(0, np.int64)


Tables = Mapping[str, KeyedRows]


@dataclass(frozen=True, eq=False)
class Ratings:
    """Ratings by block, within a block by user; block b begins at starts[b], and what is scored at block `first`."""

    data: Interactions
    ids: Mapping[str, Int64Array]
    films: Int64Array
    labels: Float32Array
    starts: Int64Array
    first: int

    @classmethod
    def of(cls, data: Interactions, blocks: int) -> Ratings:
        """Divide ratings into blocks by their time."""
        block = np.argsort(np.argsort(data.timestamps, kind="stable")) * blocks // data.timestamps.size
        order = np.lexsort((data.user_index, block))
        films = data.film_index[order]
        ids = {"users": data.users.ids[data.user_index[order]], "films": data.films.ids[films]}
        labels = (data.ratings[order] >= LIKED_RATING).astype(np.float32)
        starts = np.searchsorted(block[order], np.arange(blocks + 1))
        return cls(data, ids, films, labels, starts, max(1, blocks // 10))

    def block(self, number: int) -> Int64Array:
        """Return the positions of a block's ratings."""
        return np.arange(self.starts[number], self.starts[number + 1])

    def requests(self, block: int) -> Iterator[dict[str, Any]]:
        """Yield a request for each user of a block, with the films that the user rates in it."""
        positions = self.block(block)
        for part in np.split(positions, np.flatnonzero(np.diff(self.ids["users"][positions])) + 1):
            genres = [self.data.films.genres_of(film) for film in self.films[part].tolist()]
            films = {"film_id": self.ids["films"][part].tolist(), "genre": genres}
            yield {"context": {"user_id": self.ids["users"][part[:1]].tolist()}, "candidates": films}

    def batch(self, positions: Int64Array, tables: Tables) -> RowBatch:
        """Return ratings as a batch, each a request of one candidate."""
        rows = {name: torch.from_numpy(table.find(self.ids[name][positions])) for name, table in tables.items()}
        lengths, at = positions_in(self.data.films.genre_offsets, self.films[positions])
        genres = torch.from_numpy(self.data.films.genre_ids[at]), torch.from_numpy(starts_of(lengths))
        each = torch.arange(positions.size + 1)
        bags = {"user_id": (rows["users"], each), "film_id": (rows["films"], each), "genre": genres}
        return RowBatch(bags, torch.zeros(positions.size, 0), each[:-1], each[:-1])


def spec_of(sizes: Mapping[str, int], **keyed: Any) -> ModelSpec:
    """Describe a DCN-v2; `keyed` is what tables of users and films have, and that of genres has not."""
    features = {"users": "user_id", "films": "film_id", "genres": "genre"}
    shape: dict[str, Any] = {"embedding_dim": DIM, "pooling": "mean"}
    tables = [
        TableSpec(
            name=name,
            num_embeddings=size,
            feature_names=(features[name],),
            **shape,
            **{} if name == "genres" else keyed,
        )
        for name, size in sizes.items()
    ]
    sides = {"user_id": "context", "film_id": "candidate", "genre": "candidate"}
    return ModelSpec(
        model=MODEL,
        tables=tuple(tables),
        features=tuple(FeatureSpec.model_validate({"name": name, "side": side}) for name, side in sides.items()),
        dense_model=DenseModelSpec(kind="dcn_v2", config={"num_cross_layers": 2, "deep": [64, 32]}),
    )


def as_stored(rows: Float32Array) -> Float32Array:
    """Return rows as they are worth once stored."""
    return CODEC.decode(CODEC.encode(rows))


class Trainer:
    """Trains block after block; `published` is the model as it was published last."""

    def __init__(self, ratings: Ratings, tables: Tables, seed: int) -> None:
        torch.manual_seed(seed)
        self.ratings, self.tables, self.draw = ratings, tables, np.random.default_rng(seed)
        self.sizes = {name: table.num_rows for name, table in tables.items()}
        self.sizes["genres"] = len(ratings.data.films.genre_names)
        spec = spec_of(self.sizes)
        self.network, self.published = RankingNetwork(spec).train(), RankingNetwork(spec).eval()
        self.rows = {name: self.network.parameter(name) for name in self.sizes}
        values = self.rows.values()
        self.for_rows = torch.optim.Adagrad(values, ROW_RATE, initial_accumulator_value=ROW_ACCUMULATOR)
        self.for_dense = torch.optim.Adam(self.network.ranking.parameters(), DENSE_RATE)

    def learn(self, block: int) -> None:
        """Train with a block's ratings."""
        positions = self.ratings.block(block)
        for name, table in self.tables.items():
            new, rows = table.learn(self.ratings.ids[name][positions], block), self.rows[name]
            if table.is_scored and new.size:
                # A new key goes on from what it was scored by.
                rows.data[new] = rows.data[0].clone()
                self.for_rows.state[rows]["sum"][new] = ROW_ACCUMULATOR
        for _ in range(PASSES):
            for part in np.array_split(self.draw.permutation(positions), max(1, positions.size // SAMPLES_PER_STEP)):
                logits = self.network(self.ratings.batch(part, self.tables))
                loss = F.binary_cross_entropy_with_logits(logits, torch.from_numpy(self.ratings.labels[part]))
                self.network.zero_grad()
                torch.autograd.backward(loss)
                self.for_rows.step()
                self.for_dense.step()

    def begin(self) -> None:
        """Learn the first tenth. Rows that no id of it has become the mean of the others, as at an export."""
        for block in range(self.ratings.first):
            self.learn(block)
        for name, table in self.tables.items():
            used, rows = (
                np.unique(table.find(self.ratings.ids[name][: self.ratings.starts[self.ratings.first]])),
                self.rows[name],
            )
            mean = as_stored(rows.detach().numpy()[used]).mean(axis=0, dtype=np.float64, keepdims=True)
            rows.data[np.setdiff1d(np.arange(table.num_rows), used)] = torch.from_numpy(
                as_stored(mean.astype(np.float32))
            )
            table.is_scored = True
        self.publish()

    def publish(self) -> None:
        """Have `published` be what is trained, rows as they are stored."""
        for name, rows in self.rows.items():
            self.published.parameter(name).data = torch.from_numpy(as_stored(rows.detach().numpy()))
        self.published.ranking.load_state_dict(self.network.ranking.state_dict())

    def scores(self, block: int) -> Float32Array:
        """Score a block's ratings as published, float32 [n]."""
        with torch.inference_mode():
            batch = self.ratings.batch(self.ratings.block(block), self.tables)
            scores: Float32Array = torch.sigmoid(self.published(batch)).numpy()
        return scores

    def rows_of(self, name: str, keys: Int64Array) -> Float32Array:
        """Return the trained rows of keys, or of genres, float32 [n, DIM]."""
        at = self.tables[name].find(keys) if name in self.tables else keys
        rows: Float32Array = self.rows[name].detach().numpy()[at]
        return rows


class ServedModel:
    """A trainer's model in a fleet; `counts` are of keys that were upserted, deleted, and missing in requests."""

    def __init__(self, trainer: Trainer, folder: Path, stack: ExitStack) -> None:
        self.trainer, self.counts, self.step = trainer, Counter[str](), 0
        keys = {name: np.array([*table.row_of], np.int64) for name, table in trainer.tables.items()}
        self.genres = np.arange(trainer.sizes["genres"])
        rows = {name: ArrayRows(trainer.rows_of(name, of)) for name, of in (keys | {"genres": self.genres}).items()}
        spec = spec_of(trainer.sizes, keys="int64", missing="mean")
        store, registry = folder / "store", str(folder / "registry")
        export_snapshot(store, spec, rows=rows, keys=keys, dense=trainer.network.dense())
        options: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "replicate_bytes": 0, "serve": FLOAT32}
        portal = stack.enter_context(start_blocking_portal())
        running = running_fleet(FleetConfig(store=store, registry=registry, shards=2, **options))
        fleet = stack.enter_context(portal.wrap_async_context_manager(running))
        self.client = stack.enter_context(Client(url_of(fleet, "grpc")))
        self.publisher = stack.enter_context(DeltaPublisher(registry, MODEL, 1, store))

    def scores(self, block: int) -> Float32Array:
        """Have a block's requests ranked, float32 [n], with all that was published. Raises TimeoutError."""
        scores, ends = list[Float32Array](), time.monotonic() + ANSWER_TIMEOUT_S
        for request in self.trainer.ratings.requests(block):
            # A dense step answers only where all rows of a request have the deltas before it.
            while (answer := self.client.rank(MODEL, **request, return_missing=True)).dense_step != self.step:
                if time.monotonic() > ends:
                    raise TimeoutError(f"dense step {answer.dense_step} answers, not {self.step}")
                time.sleep(0.01)
            scores.append(answer.scores)
            self.counts.update({f"missing {name}": one.keys.size for name, one in (answer.missing or {}).items()})
        return np.concatenate(scores)

    def publish(self, block: int, gone: Mapping[str, Int64Array]) -> None:
        """Publish what a block changed: keys with their rows, keys that go, rows of genres, dense weights."""
        ratings = self.trainer.ratings
        for name, forgotten in gone.items():
            keys = np.unique(ratings.ids[name][ratings.block(block)])
            self.publisher.upsert(name, keys, self.trainer.rows_of(name, keys))
            self.publisher.delete(name, forgotten)
            self.counts.update({f"upserted {name}": keys.size, f"deleted {name}": forgotten.size})
        self.publisher.publish("genres", self.genres, self.trainer.rows_of("genres", self.genres))
        self.step += 1
        self.publisher.publish_dense(self.step, self.trainer.network.dense())


def run(ratings: Ratings, tables: Tables, seed: int, *, is_served: bool) -> tuple[float, dict[str, Any]]:
    """Return the AUC of all blocks after the first tenth, and what is known of the served model."""
    trainer, scores, served = Trainer(ratings, tables, seed), list[Float32Array](), list[Float32Array]()
    trainer.begin()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = ServedModel(trainer, folder, stack) if is_served else None
        for block in range(ratings.first, ratings.starts.size - 1):
            scores.append(trainer.scores(block))
            if model is not None:
                served.append(model.scores(block))
            trainer.learn(block)
            gone = {name: table.forget(block) for name, table in tables.items()}
            trainer.publish()
            if model is not None:
                model.publish(block, gone)
    labels, trained = ratings.labels[ratings.starts[ratings.first] :], np.concatenate(scores)
    if model is None:
        return auc(labels, trained), {}
    largest = float(np.abs(np.concatenate(served) - trained).max())
    return auc(labels, trained), {"auc": auc(labels, np.concatenate(served)), "max_score_diff": largest, **model.counts}


def variants(ratings: Ratings, forget_after: int) -> dict[str, Tables]:
    """Return what is compared, by name; hashed rows are as many as fit in a share of the bytes of keyed ones."""
    ids = {name: np.unique(values) for name, values in ratings.ids.items()}
    rows_of_key = (CODEC.row_bytes + INDEX_BYTES) / CODEC.row_bytes
    hashed = {
        f"hashed, {share:.2f} of the bytes": {
            name: HashedRows(int(share * rows_of_key * values.size)) for name, values in ids.items()
        }
        for share in (1, 0.5, 0.25)
    }
    return {
        "keyed": {name: KeyedRows(values.size) for name, values in ids.items()},
        "keyed, forgetting": {name: KeyedRows(values.size, forget_after) for name, values in ids.items()},
        **hashed,
        "vocabulary of the first tenth": {name: KeyedRows(values.size, frozen=True) for name, values in ids.items()},
        "a row for each id": {name: HashedRows(int(values[-1]), by_number=True) for name, values in ids.items()},
    }


def main() -> None:
    """Run every variant with every seed, and print each one's bytes, AUC, and difference from `keyed` by seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of MovieLens 100K: u.data, u.item, u.user, u.genre")
    parser.add_argument("--blocks", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--forget-after", type=int, default=20, metavar="BLOCKS")
    arguments = parser.parse_args()
    ratings, report = Ratings.of(read_movielens(arguments.folder), arguments.blocks), dict[str, dict[str, Any]]()
    for seed in range(arguments.seeds):
        for name, tables in variants(ratings, arguments.forget_after).items():
            value, served = run(ratings, tables, seed, is_served=seed == 0 and "forgetting" in name)
            one = report.setdefault(name, {"auc": [], "to_keyed": []} | ({"served": served} if served else {}))
            one["auc"].append(value)
            one["to_keyed"].append(value - report["keyed"]["auc"][seed])
            one["bytes"] = sum(table.num_bytes for table in tables.values())
            sys.stderr.write(f"seed {seed}, {name}: {value:.4f}\n")
    sys.stdout.write(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
