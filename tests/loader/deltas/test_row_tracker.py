"""What a tracker publishes is what a comparison of all rows finds, whatever optimizer moves them."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.nn import functional as F  # noqa: N812

from loader.deltas.blocking_publisher import DeltaPublisher
from loader.deltas.row_tracker import RowTracker
from loader.errors import DeltaError
from loader.registry import open_registry
from shardrank_testing.deltas import MODEL, export_state, published_rows, register_version
from shardrank_testing.snapshots import model_of, random_tables, table_of

ROWS = {"user": 300, "item": 500}
SPEC = model_of([table_of(name, rows, 8, dtype="fp32") for name, rows in ROWS.items()], MODEL)


class Ranker(nn.Module):
    """Users are looked up one by one, items in bags, as TorchRec's collections do it: by name."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.user = nn.Embedding(ROWS["user"], 8, sparse=sparse)
        self.embedding_bags = nn.ModuleDict({"item": nn.EmbeddingBag(ROWS["item"], 8, sparse=sparse, mode="sum")})
        self.top = nn.Linear(16, 1)

    def forward(self, users: torch.Tensor, items: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        bags = self.embedding_bags["item"](input=items, offsets=offsets)
        return self.top(torch.cat([self.user(users), bags], dim=1)).squeeze(1)


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: int, draw: torch.Generator) -> None:
    for _ in range(steps):
        users = torch.randint(ROWS["user"], (6,), generator=draw)
        items = torch.randint(ROWS["item"], (13,), generator=draw)
        loss = F.binary_cross_entropy_with_logits(
            model(users, items, torch.tensor([0, 2, 3, 7, 8, 12])), users.float() % 2
        )
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()


def rows_of(model: Ranker) -> dict[str, np.ndarray]:
    weights = {"user": model.user.weight, "item": model.embedding_bags["item"].weight}
    return {name: weight.detach().numpy().copy() for name, weight in weights.items()}


@pytest.fixture
def registry(tmp_path):
    """The URL of a registry with version 1 on record."""

    async def publish() -> str:
        opened = open_registry(tmp_path / "registry")
        await register_version(opened, export_state(tmp_path / "store", SPEC, random_tables(SPEC, 0), 1))
        await opened.close()
        return str(tmp_path / "registry")

    return asyncio.run(publish())


def sgd(parameters, **options):
    return torch.optim.SGD(parameters, lr=0.1, **options)


OPTIMIZERS = {
    "sgd": (sgd, {}),
    "momentum": (sgd, {"momentum": 0.9}),
    "decay": (sgd, {"weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.5}),
    "asgd": (torch.optim.ASGD, {"lambd": 0.01}),
}
SPARSE = {"sgd", "momentum", "adagrad"}


@pytest.mark.parametrize("every_steps", [1, 4])
@pytest.mark.parametrize("name", [*OPTIMIZERS, *(f"sparse {name}" for name in sorted(SPARSE)), "sparse adam"])
def test_what_is_tracked_is_what_changed(registry, name, every_steps):
    """Through states that were there before; of rows that stay by rounding alone, too many may be published."""
    torch.manual_seed(0)
    model, draw = Ranker(sparse=name.startswith("sparse")), torch.Generator().manual_seed(1)
    kind, options = OPTIMIZERS.get(name.removeprefix("sparse "), (torch.optim.SparseAdam, {}))
    if name == "sparse adam":
        kind, options = torch.optim.SparseAdam, {}
    tables = [model.user.weight, model.embedding_bags["item"].weight]
    optimizers = [kind(tables, **options), torch.optim.Adam(model.top.parameters())]
    train(model, optimizers, 3, draw)
    before = rows_of(model)
    with DeltaPublisher(registry, MODEL, 1) as publisher, RowTracker(model, publisher, every_steps=every_steps):
        train(model, optimizers, 10, draw)
    after, told = rows_of(model), published_rows(registry, ROWS)
    for table in ROWS:
        changed = np.flatnonzero((before[table] != after[table]).any(axis=1))
        assert set(changed) <= told[table].keys()
        extra = sorted(told[table].keys() - set(changed))
        if "adam" not in name and name not in ("momentum", "rmsprop", "sparse momentum"):
            assert extra == []
        assert all((told[table][row] == after[table][row]).all() for row in told[table])
        assert changed.size > 0
    if name not in ("decay", "adamw", "asgd"):
        assert len(told["item"]) < ROWS["item"]


def test_rows_come_after_so_many_steps_of_every_optimizer_and_at_the_end(registry):
    torch.manual_seed(0)
    model, draw = Ranker(sparse=False), torch.Generator().manual_seed(1)
    optimizers = [sgd(model.user.parameters()), sgd([*model.embedding_bags.parameters(), *model.top.parameters()])]
    with DeltaPublisher(registry, MODEL, 1) as publisher:
        with RowTracker(model, publisher, every_steps=3):
            train(model, optimizers, 2, draw)
            assert publisher.sequence == 0
            train(model, optimizers, 2, draw)
            first = publisher.sequence
            assert first > 0
            after = rows_of(model)
            train(model, optimizers, 1, draw)
            assert publisher.sequence == first
        assert publisher.sequence > first
    told, last = published_rows(registry, ROWS), rows_of(model)
    for table in ROWS:
        assert (after[table] != last[table]).any()
        assert all((told[table][row] == last[table][row]).all() for row in told[table])


def test_rows_come_after_so_many_seconds(registry):
    model, draw, now = Ranker(sparse=True), torch.Generator().manual_seed(1), [100.0]
    every = {"every_s": 5, "monotonic": lambda: now[0]}
    with DeltaPublisher(registry, MODEL, 1) as publisher, RowTracker(model, publisher, **every):
        train(model, [sgd(model.parameters())], 2, draw)
        assert publisher.sequence == 0
        now[0] = 105.0
        train(model, [sgd(model.parameters())], 1, draw)
        assert publisher.sequence > 0


def test_gradients_of_several_passes_are_of_one_step(registry):
    model, optimizer = Ranker(sparse=False), None
    optimizer = sgd(model.parameters())
    with DeltaPublisher(registry, MODEL, 1) as publisher, RowTracker(model, publisher, every_steps=1):
        for user in (3, 5):
            model(torch.tensor([user]), torch.tensor([user]), torch.tensor([0])).sum().backward()
        assert publisher.sequence == 0
        optimizer.step()
    assert {table: sorted(rows) for table, rows in published_rows(registry, ROWS).items()} == {
        "user": [3, 5],
        "item": [3, 5],
    }


def test_lookups_that_train_nothing_are_not_rows_of_a_step(registry):
    model = Ranker(sparse=False)
    asked = torch.tensor([9]), torch.tensor([9]), torch.tensor([0])
    with DeltaPublisher(registry, MODEL, 1) as publisher, RowTracker(model, publisher, every_steps=1) as tracker:
        model.eval()(*asked)
        with torch.no_grad():
            model.train()(*asked)
        tracker.step()
    assert published_rows(registry, ROWS) == {"user": {}, "item": {}}


def test_what_could_not_be_published_stays_changed(registry):
    model = Ranker(sparse=False)
    with DeltaPublisher(registry, MODEL, 1) as publisher:
        tracker = RowTracker(model, publisher, every_steps=1)
        closed = DeltaPublisher(registry, MODEL, 1)
        closed.close()
        tracker._publisher = closed
        optimizer = sgd(model.parameters())
        model(torch.tensor([3]), torch.tensor([4]), torch.tensor([0])).sum().backward()
        with pytest.raises(DeltaError, match="closed"):
            optimizer.step()
        tracker._publisher = publisher
        tracker.flush()
        tracker.close()
    assert {table: sorted(rows) for table, rows in published_rows(registry, ROWS).items()} == {"user": [3], "item": [4]}


def test_shared_rows_are_tracked_in_every_module(registry):
    model = Ranker(sparse=False)
    model.seen = nn.Embedding(ROWS["user"], 8)
    model.seen.weight = model.user.weight
    with DeltaPublisher(registry, MODEL, 1) as publisher, RowTracker(model, publisher, every_steps=1):
        optimizer = sgd([model.user.weight])
        (model.user(torch.tensor([1])).sum() + model.seen(torch.tensor([2])).sum()).backward()
        optimizer.step()
    assert sorted(published_rows(registry, ROWS)["user"]) == [1, 2]


def test_rows_without_a_module_are_tracked_by_their_parameter(registry):
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.randn(ROWS["user"], 8))

    model = Plain()
    every = {"every_steps": 1, "tables": {"user": "rows"}}
    with DeltaPublisher(registry, MODEL, 1) as publisher, RowTracker(model, publisher, **every):
        F.embedding(torch.tensor([7, 8]), model.rows).sum().backward()
        sgd(model.parameters()).step()
    assert sorted(published_rows(registry, ROWS)["user"]) == [7, 8]


def test_rows_that_are_weights_of_a_layer_as_well_are_all_found(registry):
    model = Ranker(sparse=False)
    with DeltaPublisher(registry, MODEL, 1) as publisher, RowTracker(model, publisher, every_steps=1):
        (model.user(torch.tensor([3])) @ model.user.weight.T).square().sum().backward()
        sgd(model.parameters()).step()
    assert len(published_rows(registry, ROWS)["user"]) == ROWS["user"]


def test_rows_of_every_optimizer_that_a_table_had_are_published(registry):
    """One that ends, and leaves momentum behind, one that begins, and one that is asked no more."""
    torch.manual_seed(0)
    model, draw = Ranker(sparse=False), torch.Generator().manual_seed(1)
    tables = [model.user.weight, model.embedding_bags["item"].weight]
    dense, first = torch.optim.Adam(model.top.parameters()), torch.optim.Adam(tables)
    train(model, [first, dense], 3, draw)
    before = rows_of(model)
    with DeltaPublisher(registry, MODEL, 1) as publisher, RowTracker(model, publisher, every_steps=4):
        train(model, [first, dense], 2, draw)
        train(model, [sgd(tables)], 8, draw)
        sequence = publisher.sequence
        assert sequence > 0
        first.state.clear()
        train(model, [first], 8, draw)
        assert publisher.sequence > sequence
    after, told = rows_of(model), published_rows(registry, ROWS)
    for table in ROWS:
        assert set(np.flatnonzero((before[table] != after[table]).any(axis=1))) <= told[table].keys()
        assert all((told[table][row] == after[table][row]).all() for row in told[table])


def test_decay_that_has_ended_since_has_moved_all_rows(registry):
    model, draw = Ranker(sparse=False), torch.Generator().manual_seed(1)
    optimizer = sgd(model.parameters(), weight_decay=0.1)
    with DeltaPublisher(registry, MODEL, 1) as publisher, RowTracker(model, publisher, every_steps=100):
        train(model, [optimizer], 1, draw)
        optimizer.param_groups[0]["weight_decay"] = 0.0
        train(model, [optimizer], 1, draw)
    assert {table: len(rows) for table, rows in published_rows(registry, ROWS).items()} == ROWS


def test_weights_that_are_loaded_are_changed(registry):
    model, other = Ranker(sparse=False), Ranker(sparse=False)
    with DeltaPublisher(registry, MODEL, 1) as publisher:
        with RowTracker(model, publisher, every_steps=100):
            model.load_state_dict(other.state_dict())
        assert {table: len(rows) for table, rows in published_rows(registry, ROWS).items()} == ROWS
        weights = model.user.weight, model.embedding_bags["item"].weight
        with RowTracker(model, publisher, every_steps=1):
            with pytest.raises(DeltaError, match="'user': the module has another parameter now: track it anew"):
                model.load_state_dict(other.state_dict(), assign=True)
            # Not to be published at the end.
            model.user.weight, model.embedding_bags["item"].weight = weights


@pytest.mark.parametrize("seen_by", ["the optimizer of the new one", "nobody"])
def test_a_parameter_that_is_replaced_is_noticed(registry, seen_by):
    model = Ranker(sparse=False)
    with DeltaPublisher(registry, MODEL, 1) as publisher:
        tracker = RowTracker(model, publisher, every_steps=1)
        model.user.weight = nn.Parameter(torch.randn(ROWS["user"], 8))
        with pytest.raises(DeltaError, match="another parameter now"):
            sgd([model.user.weight]).step() if seen_by != "nobody" else tracker.flush()
        tracker.close()


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda model: None, {}, "every_steps: None, every_s: None; at least one is needed"),
        (lambda model: None, {"every_steps": 0}, "every_steps: 0"),
        (lambda model: delattr(model, "user"), {"every_steps": 1}, "may be in any of {'user': \\[\\]}: say which"),
        (lambda model: setattr(model, "other", nn.ModuleDict({"user": nn.Embedding(3, 8)})), {"every_steps": 1},
         "\\['user', 'other.user'\\]"),
        (lambda model: None, {"every_steps": 1, "tables": {"user": "top"}}, "top is a Linear; expected nn.Embedding"),
        (lambda model: None, {"every_steps": 1, "tables": {"user": "x.y"}}, "table 'user': .* has no attribute `x`"),
        (lambda model: None, {"every_steps": 1, "tables": {"usre": "user"}}, "'usre': expected a table of .*, got"),
        (lambda model: setattr(model, "user", nn.Embedding(300, 4)), {"every_steps": 1}, ".300, 8., got .300, 4"),
        (lambda model: setattr(model, "user", nn.Embedding(301, 8)), {"every_steps": 1}, ".300, 8., got .301, 8"),
        (lambda model: setattr(model, "user", nn.Embedding(300, 8, max_norm=1.0)), {"every_steps": 1}, "max_norm"),
    ],
)  # fmt: skip
def test_tables_whose_rows_are_not_found_are_refused(registry, change, options, message):
    model = Ranker(sparse=False)
    change(model)
    with DeltaPublisher(registry, MODEL, 1) as publisher, pytest.raises(DeltaError, match=message):
        RowTracker(model, publisher, **options)


def test_a_table_that_moves_as_a_whole_is_told_once(registry, caplog):
    model, draw = Ranker(sparse=False), torch.Generator().manual_seed(1)
    with (
        DeltaPublisher(registry, MODEL, 1) as publisher,
        RowTracker(model, publisher, every_steps=1),
        caplog.at_level(logging.WARNING),
    ):
        train(model, [sgd(model.parameters(), weight_decay=0.1)], 3, draw)
    told = [record.getMessage() for record in caplog.records if "published each time" in record.getMessage()]
    assert sorted(told) == [
        f"table {name!r}: all rows are published each time: SGD (weight_decay 0.1) moves those without a gradient"
        for name in ("item", "user")
    ]


def test_nothing_is_published_after_it(registry):
    model, draw = Ranker(sparse=False), torch.Generator().manual_seed(1)
    optimizer = sgd(model.parameters())
    with DeltaPublisher(registry, MODEL, 1) as publisher:
        with RowTracker(model, publisher, every_steps=1):
            train(model, [optimizer], 1, draw)
        sequence = publisher.sequence
        assert sequence > 0
        train(model, [optimizer], 2, draw)
        model.load_state_dict(model.state_dict())
        with pytest.raises(DeltaError, match=r"expected .300, 8"):
            RowTracker(nn.ModuleDict({"user": nn.Embedding(3, 3)}), publisher, every_steps=1, tables={"user": "user"})
        train(model, [optimizer], 2, draw)
        assert publisher.sequence == sequence


def train_rank(rank: int, ranks: int, port: int, folder: Path, name: str) -> None:
    """Train on one of several ranks that have a copy of all rows each, tracked; save the rows that changed."""
    distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=ranks, rank=rank)
    torch.manual_seed(0)
    kind, options = OPTIMIZERS[name]
    model = Ranker(sparse=False)
    optimizer, draw = kind(model.parameters(), **options), torch.Generator().manual_seed(rank)
    copies = nn.parallel.DistributedDataParallel(model)
    before = rows_of(model)
    with DeltaPublisher(str(folder / "registry"), MODEL, 1) as publisher, RowTracker(copies, publisher, every_steps=2):
        train(copies, [optimizer], 5, draw)
    after = rows_of(model)
    changed = {table: np.flatnonzero((before[table] != after[table]).any(axis=1)) for table in ROWS}
    torch.save([changed, after], folder / f"rank-{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["sgd", "momentum", "decay", "adam"])
def test_ranks_with_copies_publish_together_what_changed(registry, tmp_path, name):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    torch.multiprocessing.spawn(train_rank, (2, port, tmp_path, name), nprocs=2)
    (changed, after), other = (torch.load(tmp_path / f"rank-{rank}.pt", weights_only=False) for rank in range(2))
    told = published_rows(registry, ROWS)
    for table in ROWS:
        assert (after[table] == other[1][table]).all()
        assert set(changed[table]) <= told[table].keys()
        assert all((told[table][row] == after[table][row]).all() for row in told[table])
