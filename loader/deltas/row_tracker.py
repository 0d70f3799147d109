"""Publish the rows that training changes, found by hooks on the modules that look them up.

A step changes the rows that its forward pass looked up, and those that an optimizer moves without a gradient: by
momentum, which it keeps for rows that were looked up before, or by weight decay. So rows are noted at a forward pass,
are changed once the optimizer of their table has stepped, and are published with those whose momentum was not zero
when they were published last. An optimizer that moves all rows of a table has all of them published.
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
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from loader.deltas.blocking_publisher import DeltaPublisher
from loader.errors import DeltaError
from loader.snapshot.manifest import ModelSpec

_MAX_NOTED: Final = 1 << 20
"""Of ids that wait for their optimizer's step: more are made unique first."""
_MOMENTS: Final = ("exp_avg", "momentum_buffer")
_WITHOUT_MOMENTUM: Final = (torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Rprop, torch.optim.SparseAdam)
_log = logging.getLogger(__name__)


class _TrackedTable:
    """One table's rows, or a rank's part of them, and which of them were noted and changed.

    `weight` is [rows, dim], its first row is `first_row` of the table; it `is_fused` if no optimizer has it as a
    parameter, because the backward pass updates it.
    """

    def __init__(self, name: str, weight: Tensor, first_row: int = 0, *, is_fused: bool = False) -> None:
        self.name, self.weight, self.first_row, self.is_fused = name, weight, first_row, is_fused
        self.optimizer: Optimizer | None = None
        self._noted: list[Tensor] = []
        self._changed = torch.zeros(len(weight), dtype=torch.bool, device=weight.device)
        self._moving: Tensor | None = None
        self._has_sparse_gradients = self._is_logged = False

    def note(self, rows: Tensor) -> None:
        """Note rows that a forward pass looks up."""
        self._noted.append(rows.detach().reshape(-1).to(self.weight.device, torch.int64, copy=True))
        if len(self._noted) > 1 and sum(map(Tensor.numel, self._noted)) > _MAX_NOTED:
            self._noted = [torch.unique(torch.cat(self._noted))]

    def stepped(self) -> None:
        """Take noted rows for changed: the optimizer has stepped. Raises DeltaError: it has, but none were noted."""
        gradient = self.weight.grad
        self._has_sparse_gradients = gradient is not None and gradient.is_sparse
        if gradient is not None and gradient.is_sparse:
            self._noted = [gradient._indices()[0]]
        elif gradient is not None and not self._noted and bool(gradient.any()):
            raise DeltaError(f"table {self.name!r}: no module that is tracked looked rows up: call `note` with them")
        for rows in self._noted:
            self._changed.index_fill_(0, rows, True)
        self._noted.clear()

    def publish(self, publisher: DeltaPublisher) -> None:
        """Publish what was changed; it stays changed if that fails. Raises as `DeltaPublisher.publish`."""
        chosen, moving = self._changed, self._rows_that_move()
        # Those that it has moved until now, and those that it begins to move.
        for rows_that_move in (self._moving, moving):
            if rows_that_move is not None:
                chosen = chosen | _of_this_rank(rows_that_move)
        rows = chosen.nonzero().reshape(-1)
        if rows.numel():
            publisher.publish(self.name, rows + self.first_row, self.weight.detach()[rows])
        self._moving = moving
        self._changed.zero_()

    def _rows_that_move(self) -> Tensor | None:
        """Return which rows the optimizer moves on without a gradient, bool [rows]; None for none."""
        if self.optimizer is None:
            return None
        (group,) = (
            of for of in self.optimizer.param_groups if any(parameter is self.weight for parameter in of["params"])
        )
        kind, dense = type(self.optimizer), not self._has_sparse_gradients
        if (group.get("weight_decay") and dense) or kind is torch.optim.ASGD:
            if not self._is_logged:
                reason = f"{kind.__name__} (weight_decay {group.get('weight_decay')}) moves those without a gradient"
                _log.warning("table %r: all rows are published each time: %s", self.name, reason)
            self._is_logged = True
            return torch.ones_like(self._changed)
        if kind in _WITHOUT_MOMENTUM:
            return None
        state = self.optimizer.state.get(self.weight, {})
        known = kind.__module__.startswith("torch.optim")
        moved = torch.zeros_like(self._changed)
        for name, values in state.items():
            if isinstance(values, Tensor) and values.shape == self.weight.shape and (name in _MOMENTS or not known):
                if values.is_sparse:
                    moved[values.coalesce().indices()[0]] = True
                else:
                    moved |= values.ne(0).any(dim=1)
        return moved


def _of_this_rank(rows: Tensor) -> Tensor:
    """Divide rows, bool [n], that every rank with a copy of the table knows of, among the ranks."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return rows
    mine = torch.arange(rows.numel(), device=rows.device) % distributed.get_world_size() == distributed.get_rank()
    return rows & mine


class RowTracker(AbstractContextManager["RowTracker"]):
    """Publishes the rows that training changed, every so many steps or seconds. A context manager.

    It hooks the module's `nn.Embedding` and `nn.EmbeddingBag`, those of TorchRec's collections as well, and the lookups
    of TorchRec's sharded ones; and, to see a step, the optimizers of the module's parameters. Where none is a
    `torch.optim.Optimizer`, `step` has to be called. With several ranks each has a tracker and publishes rows that it
    looked up, of a sharded table those that it has.

    Args:
        module: what is trained; only forward passes in training mode with gradients count.
        publisher: of the version that training goes on from; stays the caller's to close.
        every_steps, every_s: publish after so many steps, or at the first one after so many seconds; at least one.
        tables: the path of a table's module, or of a parameter whose rows go to `note`; by default of each table the
            one module whose path is, or ends in, its name.
        monotonic: seconds.

    Raises DeltaError if a table has no module, or several, and for tables with keys: `upsert` is for these.
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
        self._steps: dict[int, int] = {}
        self._has_stepped = False
        self._closing, self._parameters = ExitStack(), {id(parameter) for parameter in module.parameters()}
        spec = publisher.spec
        paths = _paths(module, spec) if tables is None else tables
        if keyed := sorted(table.name for table in spec.tables if table.keys is not None and table.name in paths):
            raise DeltaError(
                f"tables {keyed} have keys: publish their rows with `upsert`, and name the others in `tables`"
            )
        self._tables = [table for name, path in paths.items() for table in self._track(module, name, path)]
        self._closing.callback(register_optimizer_step_post_hook(self._after_step).remove)

    def note(self, table: str, rows: Tensor) -> None:
        """Note rows, whole numbers, that a step looks up without a module of its own, as by `F.embedding`."""
        for tracked in self._tables:
            if tracked.name == table:
                tracked.note(rows)

    def step(self) -> None:
        """Count a step whose optimizer is no `torch.optim.Optimizer`, and publish if it is time. Raises as `flush`."""
        if not self._has_stepped:
            self._count(0, self._tables)
        self._has_stepped = False

    def flush(self) -> None:
        """Publish all that was changed. Raises as `DeltaPublisher.publish`; what was not published stays changed."""
        for table in self._tables:
            table.publish(self._publisher)
        self._steps, self._published_at = dict.fromkeys(self._steps, 0), self._monotonic()

    def close(self) -> None:
        """Take the hooks away; what was changed since the last time is not published. Idempotent."""
        self._closing.close()

    def __exit__(self, *raised: object) -> None:
        try:
            if raised[0] is None:
                self.flush()
        finally:
            self.close()

    def _after_step(self, optimizer: Optimizer, args: Any, more: Any) -> None:
        parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if parameters.isdisjoint(self._parameters):
            return
        tables = [table for table in self._tables if id(table.weight) in parameters]
        for table in tables:
            table.optimizer = optimizer
        self._has_stepped = True
        self._count(id(optimizer), [*tables, *(table for table in self._tables if table.is_fused)])

    def _count(self, optimizer: int, tables: Sequence[_TrackedTable]) -> None:
        for table in tables:
            table.stepped()
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        # Once each of the optimizers has stepped.
        steps, elapsed_s = min(self._steps.values()), self._monotonic() - self._published_at
        is_due = self._every_steps is not None and steps >= self._every_steps
        if is_due or (self._every_s is not None and steps and elapsed_s >= self._every_s):
            self.flush()

    def _track(self, module: nn.Module, name: str, path: str) -> Iterator[_TrackedTable]:
        """Yield a table, or the parts of it that this rank has, hooked where a module looks its rows up."""
        parent, _, name_in_parent = path.rpartition(".")
        owner = getattr(module.get_submodule(parent), name_in_parent)
        if isinstance(owner, nn.Embedding | nn.EmbeddingBag):
            tracked = _TrackedTable(name, owner.weight)
            for other in module.modules():
                # Those that share its rows as well.
                if isinstance(other, nn.Embedding | nn.EmbeddingBag) and other.weight is owner.weight:
                    note = partial(_note_input, tracked)
                    self._closing.callback(other.register_forward_pre_hook(note, with_kwargs=True).remove)
            yield tracked
        elif isinstance(owner, nn.Parameter):
            yield _TrackedTable(name, owner)
        elif (lookups := getattr(module.get_submodule(parent.rpartition(".")[0]), "_lookups", None)) is not None:
            yield from _sharded(name, owner.weight, lookups, self._closing)
        else:
            kinds = "nn.Embedding, nn.EmbeddingBag, a parameter, or of a TorchRec collection"
            raise DeltaError(f"table {name!r}: {path} is a {type(owner).__name__}; expected {kinds}")


def _paths(module: nn.Module, spec: ModelSpec) -> dict[str, str]:
    """Return the path of the module that has the rows of each table, or of each part that is trained as a table.

    Raises DeltaError for a table that has none, or several, and for one with keys.
    """
    owners = [
        path for path, owner in module.named_modules() if isinstance(getattr(owner, "weight", None), nn.Parameter)
    ]
    paths_of: dict[str, str] = {}
    for table in spec.logical_tables:
        names = dict.fromkeys((table.name, *(part.name for part in spec.parts(table))))
        paths = {name: [path for path in owners if _is_named(path, name)] for name in names}
        by_name = {name: of_name[0] for name, of_name in paths.items() if len(of_name) == 1}
        if not by_name or any(len(of_name) > 1 for of_name in paths.values()):
            problem = f"its rows may be in any of {paths}: say which with `tables`; there are {owners}"
            raise DeltaError(f"table {table.name!r}: {problem}")
        paths_of |= by_name
    return paths_of


def _is_named(path: str, name: str) -> bool:
    return any(path == end or path.endswith(f".{end}") for end in (name, name.replace(".", "/")))


def _sharded(name: str, parameter: Tensor, lookups: Iterable[Any], closing: ExitStack) -> Iterator[_TrackedTable]:
    """Yield the parts of a table that a rank has of one of TorchRec's sharded collections, by its lookups.

    They get the ids of the rank's own rows, counted from the first of these (`local_metadata`). Source:
    meta-pytorch/torchrec, torchrec/distributed/embeddingbag.py, embedding_lookup.py, batched_embedding_kernel.py, 1.8.
    """
    for lookup in (getattr(lookup, "module", lookup) for lookup in lookups):
        for kernel in lookup._emb_modules:
            weights = kernel.split_embedding_weights()
            for config, weight in zip(kernel._config.embedding_tables, weights, strict=True):
                if config.name == name:
                    if weight.shape[1] != config.embedding_dim:
                        raise DeltaError(f"table {name!r}: divided by columns over ranks; rows are published whole")
                    first = 0 if config.local_metadata is None else config.local_metadata.shard_offsets[0]
                    # Every rank has a copy of one that is trained by gradients.
                    is_fused = config.local_metadata is not None
                    tracked = _TrackedTable(name, weight if is_fused else parameter, first, is_fused=is_fused)
                    note = partial(_note_features, tracked, config.feature_names)
                    closing.callback(lookup.register_forward_pre_hook(note).remove)
                    yield tracked


def _note_input(tracked: _TrackedTable, module: Any, args: tuple[Any, ...], more: Mapping[str, Any]) -> None:
    # With max_norm a lookup scales rows, whatever it is for.
    if (module.training and torch.is_grad_enabled()) or module.max_norm is not None:
        tracked.note(args[0] if args else more["input"])


def _note_features(tracked: _TrackedTable, features: Sequence[str], module: nn.Module, args: tuple[Any, ...]) -> None:
    if module.training and torch.is_grad_enabled():
        for feature in features:
            tracked.note(args[0][feature].values())
