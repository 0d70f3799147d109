"""Launches of the pooling kernel on the bench's table, as the engine makes them, and the check of what they give."""

from __future__ import annotations

from types import TracebackType

import numpy as np
import torch

from loadtest.gpu_rows import RowsOnCard, one_table_layout
from shard_node.cuda.batch import BatchShapes
from shard_node.cuda.cards import Memory
from shard_node.cuda.cost_model import SECTOR_BYTES, sector_bytes
from shard_node.cuda.kernel_params import (
    MODES,
    OUT_BYTES,
    OUT_DTYPES,
    ArenaParams,
    BatchParams,
    OutDtype,
    RunParams,
)

CHECKED_BAGS = 64
TOLERANCE: dict[OutDtype, float] = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2}
"""Of the norm of a checked bag, against the reference in float64."""
_TORCH: dict[OutDtype, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class WrongAnswerError(AssertionError):
    """A kernel's answer is not the reference's."""


class Bags:
    """Batches of `batch` bags of `hotness` rows, one for each of `num_sets` input sets. A context that frees them.

    Args:
        rows: the table.
        values: int32 [at least num_sets * batch * hotness] on the card: the sets one after the other.
        batch: bags.
        hotness: rows of a bag.
        num_sets: sets of values.
        out_dtype: of the pooled bags.
    """

    def __init__(
        self, rows: RowsOnCard, values: Memory, batch: int, hotness: int, num_sets: int, out_dtype: OutDtype = "fp32"
    ) -> None:
        self.rows, self.batch, self.hotness, self.num_sets, self.out_dtype = rows, batch, hotness, num_sets, out_dtype
        self._values = values
        (self._shape,) = BatchShapes(one_table_layout(rows.embedding_dim, rows.card_rows)).arenas
        self._grid = (-(-batch // self._shape.bags_per_block), self._shape.column_tiles)
        blocks = np.zeros((self._grid[0], 2), np.uint32)
        blocks[:, 1] = np.arange(self._grid[0]) * self._shape.bags_per_block
        offsets = np.arange(0, (batch + 1) * hotness, hotness, dtype=np.uint32)
        run = RunParams(0, 0, batch, MODES["sum"], 0, rows.embedding_dim)
        self._blocks, self._offsets = rows.upload(blocks.tobytes()), rows.upload(offsets.tobytes())
        self._runs, self._counters = rows.upload(bytes(run)), rows.upload(bytes(16))
        self._out = rows.card.allocate(batch * rows.embedding_dim * OUT_BYTES[out_dtype])
        self._arenas: dict[int, ArenaParams] = {}

    def __enter__(self) -> Bags:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.rows.stream.synchronize()
        for memory in (self._blocks, self._offsets, self._runs, self._counters, self._out):
            memory.free()

    @property
    def num_values(self) -> int:
        """Rows that a launch looks up."""
        return self.batch * self.hotness

    def set_of(self, number: int) -> torch.Tensor:
        """int32 [num_values], the values of a set, on the card."""
        first = 4 * number * self.num_values
        return self.rows.card.tensor(self._values, first, (self.num_values,), torch.int32)

    def out(self) -> torch.Tensor:
        """[batch, dim], where launches write."""
        shape = (self.batch, self.rows.embedding_dim)
        return self.rows.card.tensor(self._out, 0, shape, _TORCH[self.out_dtype])

    def launch(self, num_cards: int, number: int) -> None:
        """Pools a set from the table as `num_cards` logical cards hold it."""
        if num_cards not in self._arenas:
            self._arenas[num_cards] = self.rows.arena(num_cards)
        batch = BatchParams(
            self._values.address + 4 * number * self.num_values, 0, self._offsets.address, self._runs.address,
            self._blocks.address, self._out.address, self._counters.address,
            self._grid[0], 0, OUT_DTYPES[self.out_dtype], self._shape.lanes_log2,
        )  # fmt: skip
        self.rows.card.launch(self._shape.kernel, self._grid, (self._arenas[num_cards], batch), self.rows.stream)

    def launch_all(self, num_cards: int) -> None:
        """Every set once."""
        for number in range(self.num_sets):
            self.launch(num_cards, number)

    def check(self, num_cards: int, number: int, seed: int = 0) -> float:
        """Pools a set into poisoned memory and compares bags with the reference.

        Returns:
            The largest error of a checked bag, as a share of its norm.

        Raises:
            WrongAnswerError: naming the configuration and what is wrong.
        """
        rows = self.rows
        counters = rows.card.tensor(self._counters, 0, (2,), torch.int64)
        with rows.card.torch_stream(rows.stream):
            counters.zero_()
            self.out().fill_(float("nan"))
        self.launch(num_cards, number)
        chosen = np.random.default_rng(seed).integers(0, self.batch, min(CHECKED_BAGS, self.batch))
        chosen[0], chosen[-1] = 0, self.batch - 1
        with rows.card.torch_stream(rows.stream):
            unwritten = int((~torch.isfinite(self.out())).sum())
            refused = counters.tolist()
            there = torch.from_numpy(chosen).to(rows.card.torch_device)
            pooled = self.out()[there].cpu().to(torch.float64).numpy()
            bags = self.set_of(number).view(self.batch, self.hotness)[there].cpu().numpy().astype(np.int64)
        what = f"dim {rows.embedding_dim}, hotness {self.hotness}, batch {self.batch}, {num_cards} cards"
        if unwritten or any(refused):
            raise WrongAnswerError(
                f"{what}: {unwritten} elements not finite, {refused[0]} values taken for out of range, "
                f"{refused[1]} for not here"
            )
        expected = rows.reference(bags, num_cards)
        norm = np.linalg.norm(expected, axis=1)
        largest = float((np.linalg.norm(pooled - expected, axis=1) / norm).max())
        if not largest <= TOLERANCE[self.out_dtype]:
            raise WrongAnswerError(f"{what}: a bag is {largest:.2e} off, allowed: {TOLERANCE[self.out_dtype]:.0e}")
        return largest


def asked_bytes(rows: RowsOnCard, hotness: int, batch: int, out_dtype: OutDtype = "fp32") -> dict[str, float]:
    """Bytes that one launch asks for in sectors of 32, every row counted as often as it is looked up.

    A row: the sectors that its codes, scale and bias touch, in the mean over where a row begins in a sector. A place:
    one sector each, since rows are at random. Ids, offsets and pooled bags are contiguous and count as they are.
    """
    num_rows = hotness * batch
    parts = {
        "rows": sector_bytes(rows.format) * num_rows,
        "places": float(SECTOR_BYTES * num_rows),
        "ids_and_offsets": 4.0 * (num_rows + batch + 1),
        "pooled": float(batch * rows.embedding_dim * OUT_BYTES[out_dtype]),
    }
    return {**parts, "all": sum(parts.values())}
