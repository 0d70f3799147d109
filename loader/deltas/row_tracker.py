"""Publish the rows that training changes: those that a step's gradients name, and those that optimizers move besides.

After each step of an optimizer the gradients of its tables say which rows it changed: a sparse one by its indices, a
dense one by the rows that are not zero. Rows also move without a gradient: by momentum, which an optimizer keeps for
rows of steps before, so that rows whose momentum was not zero when they were published last are published again; and by
weight decay, of which all rows are published. Where a backward pass updates the rows itself, as TorchRec's sharded
tables do, the ids of its lookups say which.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from loader.deltas.blocking_publisher import DeltaPublisher
from loader.errors import DeltaError
from loader.snapshot.manifest import ModelSpec

_MOMENTS: Final = ("exp_avg", "momentum_buffer")
_WITHOUT_MOMENTUM: Final = (torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Rprop, torch.optim.SparseAdam)
_MOVING_ALL: Final = (torch.optim.ASGD, torch.optim.LBFGS)
_log = logging.getLogger(__name__)


class _TrackedTable:
    """One table's rows, or a rank's part of them, and which of them changed.

    `weight` is float [rows, dim], its first row is `first_row` of the table; `current` returns what the module has now,
    if that may change. Ranks of `group`, if there is one, have a copy each.
    """

    def __init__(
        self,
        name: str,
        weight: Tensor,
        current: Callable[[], Tensor] | None = None,
        *,
        group: Any = None,
        first_row: int = 0,
    ) -> None:
        self.name, self.weight, self.first_row = name, weight, first_row
        self._current, self._group = current, group
        self.changed = torch.zeros(len(weight), dtype=torch.bool, device=weight.device)
        # Those that the optimizer may move on, without a gradient.
        self._moving = torch.zeros_like(self.changed)
        self._optimizer: Optimizer | None = None
        self._is_logged = False

    def note(self, rows: Tensor) -> None:
        """Take rows that a backward pass will update for changed: numbers, int64 or int32 [n]."""
        self.changed.index_fill_(0, rows.detach().reshape(-1).to(self.weight.device, torch.int64), True)

    def check(self) -> None:
        """Raise DeltaError if the module has other rows than those that are tracked."""
        if self._current is not None and self._current() is not self.weight:
            raise DeltaError(f"table {self.name!r}: the module has another parameter now: track it anew")

    def stepped(self, optimizer: Optimizer | None) -> None:
        """Take the rows that an optimizer has changed."""
        gradient = self.weight.grad
        if gradient is not None and gradient.is_sparse:
            self.changed.index_fill_(0, gradient._indices()[0], True)
        elif gradient is not None:
            self.changed |= gradient.ne(0).any(dim=1)
        if optimizer is not None:
            if optimizer is not self._optimizer:
                for moving in map(self._rows_that_move, (self._optimizer, optimizer)):
                    self._moving |= moving
                self._optimizer = optimizer
            self._decay(optimizer, is_dense=gradient is not None and not gradient.is_sparse)

    def publish(self, publisher: DeltaPublisher) -> None:
        """Publish what was changed; it stays changed if that fails. Raises as `DeltaPublisher.publish`."""
        moving = self._rows_that_move(self._optimizer)
        chosen = self.changed | self._moving | moving
        if self._group is not None:
            ranks, rank = distributed.get_world_size(self._group), distributed.get_rank(self._group)
            chosen &= torch.arange(chosen.numel(), device=chosen.device) % ranks == rank
        rows = chosen.nonzero().reshape(-1)
        if rows.numel():
            publisher.publish(self.name, rows + self.first_row, self.weight.detach()[rows])
        self._moving = moving
        self.changed.zero_()

    def _decay(self, optimizer: Optimizer, *, is_dense: bool) -> None:
        """Take all rows for changed if the optimizer moves them all, and log it once."""
        groups = (of for of in optimizer.param_groups if any(parameter is self.weight for parameter in of["params"]))
        decay = max((float(of.get("weight_decay", 0.0)) for of in groups), default=0.0)
        if (decay and is_dense) or isinstance(optimizer, _MOVING_ALL):
            self.changed.fill_(True)
            if not self._is_logged:
                reason = f"{type(optimizer).__name__} (weight_decay {decay}) moves those without a gradient"
                _log.warning("table %r: all rows are published each time: %s", self.name, reason)
            self._is_logged = True

    def _rows_that_move(self, optimizer: Optimizer | None) -> Tensor:
        """Return which rows the optimizer will move without a gradient, as its state says: bool [rows]."""
        moved = torch.zeros_like(self.changed)
        if optimizer is None or isinstance(optimizer, _WITHOUT_MOMENTUM):
            return moved
        known = type(optimizer).__module__.startswith("torch.optim")
        for name, values in optimizer.state.get(self.weight, {}).items():
            if isinstance(values, Tensor) and values.shape == self.weight.shape and (name in _MOMENTS or not known):
                if values.is_sparse:
                    moved[values.coalesce().indices()[0]] = True
                else:
                    moved |= values.ne(0).any(dim=1)
        return moved


class RowTracker(AbstractContextManager["RowTracker"]):
    """Publishes the rows that training changed, every so many steps or seconds. A context manager.

    It hooks the optimizers of a module's tables: `nn.Embedding` and `nn.EmbeddingBag`, with sparse or dense gradients,
    those of TorchRec's collections as well; and the lookups of TorchRec's sharded tables. Where no optimizer is a
    `torch.optim.Optimizer`, `step` has to be called. With several ranks each has a tracker: of tables of which ranks
    have copies (DistributedDataParallel) each publishes its share, of others the rows that it has.

    Args:
        module: what is trained.
        publisher: of the version that training goes on from; stays the caller's to close.
        every_steps, every_s: publish after so many steps, or at the first one after so many seconds; at least one.
        tables: the path of a table's module or parameter, by table; by default of each table the one module whose path
            is, or ends in, its name.
        monotonic: seconds.

    Raises DeltaError if a table has no module, or several, or another shape, for tables with keys (`upsert` is for
    these) and for modules with `max_norm`, whose lookups change rows.
    """

    def __init__(
        self,
        module: nn.Module,
        publisher: DeltaPublisher,
        *,
        every_steps: int | None = None,
        every_s: float | None = None,
        tables: Mapping[str, str] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        if not (given := [each for each in (every_steps, every_s) if each is not None]) or min(given) <= 0:
            raise DeltaError(f"every_steps: {every_steps}, every_s: {every_s}; at least one is needed, above 0")
        self._publisher, self._every_steps, self._every_s = publisher, every_steps, every_s
        self._monotonic, self._published_at = monotonic, monotonic()
        # A step is over, and another one begins, when an optimizer steps that has stepped in it already.
        self._steps = self._published_step = 0
        self._stepped = set[int]()
        self._has_stepped = False
        self._parameters = {id(parameter) for parameter in module.parameters()}
        spec = publisher.spec
        paths = _paths(module, spec) if tables is None else tables
        named = [(table, table) for table in spec.tables] + [(of, spec.parts(of)[0]) for of in spec.logical_tables]
        sizes = {table.name: (table.num_embeddings, part.embedding_dim) for table, part in named}
        if keyed := sorted(table.name for table in spec.tables if table.keys is not None and table.name in paths):
            raise DeltaError(f"tables {keyed} have keys: publish their rows with `upsert`, name the others in `tables`")
        with ExitStack() as closing:
            self._tables = [table for name, path in paths.items() for table in _tracked(module, name, path, closing)]
            for table in self._tables:
                rows, dim = sizes.get(table.name, (0, 0))
                if table.weight.shape[1] != dim or table.first_row + len(table.weight) > rows:
                    expected = f"[{rows}, {dim}]" if dim else f"a table of {sorted(sizes)}"
                    raise DeltaError(f"table {table.name!r}: expected {expected}, got {list(table.weight.shape)}")
            closing.callback(register_optimizer_step_post_hook(self._after_step).remove)
            hook: Any = module.register_load_state_dict_post_hook(self._after_load)  # type: ignore[no-untyped-call]
            closing.callback(hook.remove)
            self._closing = closing.pop_all()

    def step(self) -> None:
        """Count a step whose optimizer is no `torch.optim.Optimizer`, and publish if it is time. Raises as `flush`."""
        if not self._has_stepped:
            self._count(None, self._tables)
        self._has_stepped = False

    def flush(self) -> None:
        """Publish all that was changed. Raises as `DeltaPublisher.publish`; what was not published stays changed."""
        for table in self._tables:
            table.check()
            table.publish(self._publisher)
        self._published_step, self._published_at = self._steps, self._monotonic()

    def close(self) -> None:
        """Take the hooks away; what was changed since the last time is not published. Idempotent."""
        self._closing.close()

    def __exit__(self, *raised: object) -> None:
        try:
            if raised[0] is None:
                self.flush()
                if not self._steps:
                    _log.warning(
                        "no optimizer of the module has stepped: call `step` where it is no torch.optim.Optimizer"
                    )
        finally:
            self.close()

    def _after_step(self, optimizer: Optimizer, args: Any, more: Any) -> None:
        parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for table in self._tables:
            table.check()
        if not parameters.isdisjoint(self._parameters):
            self._has_stepped = True
            self._count(optimizer, [table for table in self._tables if id(table.weight) in parameters])

    def _after_load(self, module: nn.Module, mismatched: Any) -> None:
        for table in self._tables:
            table.check()
            table.changed.fill_(True)

    def _count(self, optimizer: Optimizer | None, tables: Sequence[_TrackedTable]) -> None:
        for table in tables:
            table.stepped(optimizer)
        if not self._stepped or id(optimizer) in self._stepped:
            self._steps, self._stepped = self._steps + 1, set()
        self._stepped.add(id(optimizer))
        is_due = self._every_steps is not None and self._steps - self._published_step >= self._every_steps
        if is_due or (self._every_s is not None and self._monotonic() - self._published_at >= self._every_s):
            self.flush()


def _tracked(module: nn.Module, name: str, path: str, closing: ExitStack) -> Iterator[_TrackedTable]:
    """Yield a table, or the parts of it that this rank has. Raises DeltaError if its rows are not there."""
    parent, _, name_in_parent = path.rpartition(".")
    try:
        owner = getattr(module.get_submodule(parent), name_in_parent)
        collection = module.get_submodule(parent.rpartition(".")[0])
    except AttributeError as error:
        raise DeltaError(f"table {name!r}: {error}") from error
    if getattr(owner, "max_norm", None) is not None:
        raise DeltaError(f"table {name!r}: {path} has max_norm, whose lookups change rows that no step changes")
    at = module.get_submodule(parent) if isinstance(owner, nn.Parameter) else owner
    attribute = name_in_parent if isinstance(owner, nn.Parameter) else "weight"
    weight: Any = getattr(at, attribute, None)
    if (lookups := getattr(collection, "_lookups", None)) is not None:
        yield from _sharded(name, weight, lookups, closing)
    elif isinstance(owner, nn.Embedding | nn.EmbeddingBag | nn.Parameter):
        copied = (part for part in module.modules() if isinstance(part, DistributedDataParallel))
        groups = [part.process_group for part in copied if any(each is weight for each in part.parameters())]
        yield _TrackedTable(name, weight, partial(getattr, at, attribute), group=groups[0] if groups else None)
    else:
        kinds = "nn.Embedding, nn.EmbeddingBag, a parameter, or of a TorchRec collection"
        raise DeltaError(f"table {name!r}: {path} is a {type(owner).__name__}; expected {kinds}")


def _paths(module: nn.Module, spec: ModelSpec) -> dict[str, str]:
    """Return the path of the module that has the rows of each table, or of each part that is trained as a table.

    Raises DeltaError for a table that has none, or several.
    """
    owners = [
        path for path, owner in module.named_modules() if isinstance(getattr(owner, "weight", None), nn.Parameter)
    ]
    paths_of: dict[str, str] = {}
    for table in spec.logical_tables:
        names = dict.fromkeys((table.name, *(part.name for part in spec.parts(table))))
        ends = {name: (f".{name}", f".{name.replace('.', '/')}") for name in names}
        paths = {name: [path for path in owners if f".{path}".endswith(ends[name])] for name in names}
        by_name = {name: of_name[0] for name, of_name in paths.items() if len(of_name) == 1}
        if not by_name or any(len(of_name) > 1 for of_name in paths.values()):
            problem = f"its rows may be in any of {paths}: say which with `tables`; there are {owners}"
            raise DeltaError(f"table {table.name!r}: {problem}")
        paths_of |= by_name
    return paths_of


def _sharded(name: str, parameter: Any, lookups: Iterable[Any], closing: ExitStack) -> Iterator[_TrackedTable]:
    """Yield the parts of a table that a rank has of one of TorchRec's sharded collections, by its lookups.

    They get the ids of the rank's own rows, counted from the first of these (`local_metadata`), and update these in the
    backward pass; a data-parallel table has gradients, and a copy on each rank. Source: meta-pytorch/torchrec,
    torchrec/distributed/embeddingbag.py, embedding_lookup.py, batched_embedding_kernel.py, of 1.8.
    """
    for lookup in lookups:
        inner = getattr(lookup, "module", lookup)
        for kernel in inner._emb_modules:
            weights = kernel.split_embedding_weights()
            for config, weight in zip(kernel._config.embedding_tables, weights, strict=True):
                if config.name != name:
                    continue
                if config.local_metadata is None:
                    yield _TrackedTable(name, parameter, group=lookup.process_group)
                    continue
                if weight.shape[1] != config.embedding_dim:
                    raise DeltaError(f"table {name!r}: divided by columns over ranks; rows are published whole")
                first = config.local_metadata.shard_offsets[0]
                tracked = _TrackedTable(name, weight, first_row=first)
                note = partial(_note_features, tracked, config.feature_names)
                closing.callback(inner.register_forward_pre_hook(note).remove)
                yield tracked


def _note_features(tracked: _TrackedTable, features: Sequence[str], module: nn.Module, args: tuple[Any, ...]) -> None:
    if module.training and torch.is_grad_enabled():
        for feature in features:
            tracked.note(args[0][feature].values())
