"""Make one large int8 table on a card, draw ids of it, pool bags of its rows and check them against a reference.

No snapshot is read: exporting tens of gigabytes takes longer than all measurements together. Codes, scales and biases
are random, and what a bag must come to is computed from the same bytes on the host, in float64.
"""

from __future__ import annotations

import ctypes
import math
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from loader.snapshot.manifest import DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.tables import TableSpec
from serving.models.inputs import SideShapes
from shard_node.bags import TableLayout
from shard_node.cuda.batch import BatchShapes
from shard_node.cuda.cards import Card, Cards, Memory, PinnedMemory, Stream
from shard_node.cuda.kernel_params import (
    MAX_OWNERS,
    MODES,
    OUT_BYTES,
    OUT_DTYPES,
    ArenaParams,
    BatchParams,
    OutDtype,
    RowFormat,
    RunParams,
    TableParams,
    owner_bits,
    pinned_owner,
)
from shard_node.planning.cost_model import SECTOR_BYTES, sector_bytes

AnyMemory = TypeVar("AnyMemory", Memory, PinnedMemory)
Ids = Literal["uniform", "zipf"]
ZIPF_EXPONENT = 1.05
# Far from a power of two and prime to most numbers of rows: neighbouring ranks lie in distant rows.
_SCATTER = 1_000_003
_PIECE = 1 << 22


def draw(ids: Ids, num_rows: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """Draw int32 [count] of rows below `num_rows`, on the generator's device.

    `zipf`: P(rank) proportional to rank^-1.05, by inverting the distribution function of the continuous power law on
    [1, num_rows + 1) and rounding down; ranks are scattered over the rows.
    """
    drawn = torch.empty(count, dtype=torch.int32, device=generator.device)
    multiplier = _prime_to(num_rows)
    for first in range(0, count, _PIECE):
        part = drawn[first : first + _PIECE]
        if ids == "uniform":
            part.random_(0, num_rows, generator=generator)
            continue
        # float64: near 1 the exponent 1 / (1 - 1.05) = -20 leaves float32 without a digit.
        share = torch.rand(part.numel(), dtype=torch.float64, device=drawn.device, generator=generator)
        ranks = _ranks(share, num_rows).mul_(multiplier).add_(num_rows // 3).remainder_(num_rows)
        part.copy_(ranks)
    return drawn


def _ranks(share: torch.Tensor, num_rows: int) -> torch.Tensor:
    power = 1 - ZIPF_EXPONENT
    share.mul_((num_rows + 1) ** power - 1).add_(1).pow_(1 / power).sub_(1)
    return share.to(torch.int64).clamp_(0, num_rows - 1)


def _prime_to(num_rows: int) -> int:
    multiplier = _SCATTER
    while math.gcd(multiplier, num_rows) != 1:
        multiplier += 2
    return multiplier


def draw_split(
    card_rows: int, host_rows: int, share_on_card: float, count: int, generator: torch.Generator
) -> torch.Tensor:
    """Draw int32 [count]: below `card_rows` with probability `share_on_card`, else one of the `host_rows` behind."""
    drawn = draw("uniform", card_rows, count, generator)
    for first in range(0, count, _PIECE):
        part = drawn[first : first + _PIECE]
        elsewhere = torch.rand(part.numel(), device=drawn.device, generator=generator) >= share_on_card
        behind = torch.empty_like(part).random_(0, host_rows, generator=generator).add_(card_rows)
        part.copy_(torch.where(elsewhere, behind, part))
    return drawn


def share_of_distinct(values: torch.Tensor) -> float:
    """Count the distinct rows of one batch, as a share: what a perfect cache would have to fetch."""
    return int(torch.unique(values).numel()) / values.numel()


ROW_MULTIPLE = 64
"""Rows of the table are a multiple of this, so that they split evenly over logical cards."""
_PIECE_BYTES = 1 << 28


def one_table_layout(embedding_dim: int, num_rows: int) -> TableLayout:
    """Lay out a model with one int8 table."""
    table = TableSpec(name="rows", num_embeddings=num_rows, embedding_dim=embedding_dim, feature_names=("row",))
    features = (FeatureSpec(name="row", side="candidate"),)
    return TableLayout.of(
        ModelSpec(model="bench", tables=(table,), features=features, dense_model=DenseModelSpec(kind="mlp"))
    )


class OwnedMemory(ExitStack):
    """A context that gives memory back at its end, when the stream's work on it is done."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream

    def own(self, memory: AnyMemory) -> AnyMemory:
        """Free this memory at the end."""
        self.callback(self._free, memory)
        return memory

    def _free(self, memory: Memory | PinnedMemory) -> None:
        self.stream.synchronize()
        memory.free()


NO_PLACES = 0
"""In place of a number of logical cards: one that has all rows, so that none has a place; without the host's."""


@dataclass(slots=True)
class Placed:
    """The table as a number of logical cards hold it; the host's rows are behind all of theirs."""

    places: Memory | None
    tables: Memory
    starts: Memory


class RowsOnCard(OwnedMemory):
    """Rows 0 .. card_rows - 1 on the card; `host_rows` more in pinned memory.

    Row r of the card's lies with logical card r mod n, there in slot r div n; each of the n has an equal stretch of one
    allocation. So the same bytes are the table of any number of logical cards.
    """

    def __init__(
        self,
        cards: Cards,
        card: Card,
        embedding_dim: int,
        table_bytes: int,
        host_bytes: int,
        stream: Stream | None = None,
    ) -> None:
        super().__init__(stream or card.stream())
        self.cards, self.card, self.embedding_dim = cards, card, embedding_dim
        self.format = RowFormat.of("int8", embedding_dim)
        self.stride, self._tail = self.format.stride, self.format.tail_offset
        self.card_rows = -(-table_bytes // (self.format.row_bytes * ROW_MULTIPLE)) * ROW_MULTIPLE
        self.host_rows = min(host_bytes // self.stride, self.card_rows // 2)
        self.generator = torch.Generator(card.torch_device).manual_seed(embedding_dim)
        self._placed: dict[int, Placed] = {}
        self.memory = self.own(card.allocate(self.card_rows * self.stride))
        self._pinned: PinnedMemory | None = None
        try:
            self._fill()
            if self.host_rows:
                self._pinned = self.own(cards.allocate_pinned(self.host_rows * self.stride))
                # The last of the card's rows: slot i of the host is then no row that slot i of a card is.
                source = self.memory.address + (self.card_rows - self.host_rows) * self.stride
                card.copy_to_host(self._pinned, 0, source, self._pinned.size_bytes, self.stream)
                self.stream.synchronize()
        except BaseException:
            self.close()
            raise

    def _fill(self) -> None:
        rows_a_piece = max(1, _PIECE_BYTES // self.stride)
        first_float = self._tail // 4
        with self.card.torch_stream(self.stream):
            for first in range(0, self.card_rows, rows_a_piece):
                rows = min(rows_a_piece, self.card_rows - first)
                begin = first * self.stride
                codes = self.card.tensor(self.memory, begin, (rows * self.stride,), torch.uint8)
                codes.random_(0, 256, generator=self.generator)
                floats = self.card.tensor(self.memory, begin, (rows, self.stride // 4), torch.float32)
                random = torch.rand((2, rows), device=self.card.torch_device, generator=self.generator)
                floats[:, first_float] = random[0].add(0.5).div(255)
                floats[:, first_float + 1] = random[1].sub(0.5)
        self.stream.synchronize()

    def placed(self, num_cards: int) -> Placed:
        """Place all rows over `num_cards` logical cards, or `NO_PLACES`; made once."""
        if num_cards not in self._placed:
            self._placed[num_cards] = self._place(num_cards)
        return self._placed[num_cards]

    def _place(self, num_cards: int) -> Placed:
        offsets = np.zeros((1, max(1, num_cards) + 2), np.uint64)
        starts = self.own(self.upload(self.cards.switches.starts(offsets, list(self._owners(num_cards))).tobytes()))
        if num_cards == NO_PLACES:
            table = TableParams(num_rows=self.card_rows, owner_after=1)
            return Placed(None, self.own(self.upload(bytes(table))), starts)
        bits, rows = owner_bits(num_cards), self.card_rows + self.host_rows
        places = self.own(self.card.allocate(4 * rows))
        device = self.card.torch_device
        piece = _PIECE_BYTES // 8
        with self.card.torch_stream(self.stream):
            for first in range(0, rows, piece):
                count = min(piece, rows - first)
                row = torch.arange(first, first + count, dtype=torch.int64, device=device)
                on_card = row.div(num_cards, rounding_mode="floor") << bits | row.remainder(num_cards)
                on_host = (row - self.card_rows) << bits | pinned_owner(num_cards)
                # int64 to int32 keeps the low 32 bits, which is what the kernel reads as uint32.
                place = torch.where(row < self.card_rows, on_card, on_host).to(torch.int32)
                self.card.tensor(places, 4 * first, (count,), torch.int32).copy_(place)
        return Placed(places, self.own(self.upload(bytes(TableParams(num_rows=rows)))), starts)

    def _owners(self, num_cards: int) -> ctypes.Array[ctypes.c_uint64]:
        """Say where the rows of each owner begin."""
        num_cards = max(1, num_cards)
        owners = (ctypes.c_uint64 * MAX_OWNERS)()
        for owner in range(num_cards):
            owners[owner] = self.memory.address + owner * (self.card_rows // num_cards) * self.stride
        owners[pinned_owner(num_cards)] = self._pinned.address if self._pinned is not None else 0
        return owners

    def upload(self, content: bytes) -> Memory:
        """Copy this content to memory of the card."""
        memory = self.card.allocate(len(content))
        with self.card.torch_stream(self.stream):
            source = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            self.card.tensor(memory, 0, (len(content),), torch.uint8).copy_(source)
        self.stream.synchronize()
        return memory

    def arena(self, num_cards: int) -> ArenaParams:
        """Fill in the kernel's parameters."""
        placed, owners = self.placed(num_cards), self._owners(num_cards)
        num_cards = max(1, num_cards)
        return ArenaParams(
            rows=owners,
            places=placed.places.address if placed.places is not None else 0,
            tables=placed.tables.address,
            starts=placed.starts.address,
            num_tables=1,
            num_cards=num_cards,
            owner_bits=owner_bits(num_cards),
            row_stride=self.stride,
            embedding_dim=self.embedding_dim,
        )

    def stored(self, rows: npt.NDArray[np.int64], num_cards: int) -> npt.NDArray[np.uint8]:
        """Read the bytes of rows, uint8 [n, stride], without the places."""
        found = np.empty((rows.size, self.stride), np.uint8)
        on_card = rows < self.card_rows
        num_cards = max(1, num_cards)
        slots = rows[on_card] % num_cards * (self.card_rows // num_cards) + rows[on_card] // num_cards
        with self.card.torch_stream(self.stream):
            table = self.card.tensor(self.memory, 0, (self.card_rows, self.stride), torch.uint8)
            found[on_card] = table[torch.from_numpy(slots).to(self.card.torch_device)].cpu().numpy()
        if self._pinned is not None:
            host = self._pinned.array.reshape(self.host_rows, self.stride)
            found[~on_card] = host[rows[~on_card] - self.card_rows]
        return found

    def reference(self, bags: npt.NDArray[np.int64], num_cards: int) -> npt.NDArray[np.float64]:
        """Sum bags, int64 [n, hotness] of rows, from the bytes themselves: float64 [n, dim]."""
        stored = self.stored(bags.reshape(-1), num_cards)
        end = self._tail + self.format.tail_bytes
        scale_bias = np.ascontiguousarray(stored[:, self._tail : end]).view(np.float32).astype(np.float64)
        rows = stored[:, : self.embedding_dim] * scale_bias[:, :1] + scale_bias[:, 1:]
        summed: npt.NDArray[np.float64] = rows.reshape(*bags.shape, self.embedding_dim).sum(axis=1)
        return summed

    def floats(self, first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Dequantise the card's rows `first` and on, as one logical card has them: [count, dim]."""
        codes, scale_bias = self.parts(first, count)
        return codes.to(torch.float32).mul_(scale_bias[:, :1]).add_(scale_bias[:, 1:]).to(dtype)

    def parts(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """View codes, uint8 [count, dim], and scale and bias, float32 [count, 2], of the card's rows from `first`."""
        begin, column = first * self.stride, self._tail // 4
        stored = self.card.tensor(self.memory, begin, (count, self.stride), torch.uint8)
        floats = self.card.tensor(self.memory, begin, (count, self.stride // 4), torch.float32)
        return stored[:, : self.embedding_dim], floats[:, column : column + 2]


CHECKED_BAGS = 64
TOLERANCE: dict[OutDtype, float] = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2}
"""Of the norm of a checked bag, against the reference in float64."""
TORCH_DTYPES: dict[OutDtype, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


PRODUCT_FEATURES, PRODUCT_DENSE_INPUTS = 26, 13
"""Of DLRM-v2: a candidate's row of the dense model's input is `[26 features | 13 dense inputs | zeros]`."""
Columns = Literal["product", "dense"]
"""How bags are written: into the columns of that input, a feature's bags below each other; or one after the other."""


class WrongPoolingError(AssertionError):
    """A kernel's answer is not the reference's."""


class Bags(OwnedMemory):
    """Batches of `batch` bags of `hotness` rows, one for each of `num_sets` input sets.

    The sets lie one after the other in `values`, int32 [at least num_sets * batch * hotness] on the card. With the
    product's columns each of its features has an equal share of the bags, as so many candidates.
    """

    def __init__(
        self,
        rows: RowsOnCard,
        values: Memory,
        batch: int,
        hotness: int,
        num_sets: int,
        out_dtype: OutDtype = "fp32",
        columns: Columns = "dense",
    ) -> None:
        super().__init__(rows.stream)
        self.rows, self.batch, self.hotness, self.num_sets, self.out_dtype = rows, batch, hotness, num_sets, out_dtype
        self._values = values
        layout = one_table_layout(rows.embedding_dim, rows.card_rows)
        (self._shape,) = BatchShapes(layout, rows.cards.switches).arenas
        dims = {f"feature_{number}": rows.embedding_dim for number in range(PRODUCT_FEATURES)}
        shapes = SideShapes.of(
            dims if columns == "product" else {"feature_0": rows.embedding_dim}, PRODUCT_DENSE_INPUTS
        )
        starts = list(shapes.offsets.values())
        self._width = shapes.padded_width if columns == "product" else rows.embedding_dim
        self._candidates = -(-batch // len(starts))
        runs, blocks = [], []
        for number, first in enumerate(range(0, batch, self._candidates)):
            count = min(self._candidates, batch - first)
            runs.append(bytes(RunParams(0, first, count, MODES["sum"], starts[number], self._width)))
            firsts = np.arange(0, count, self._shape.bags_per_block, dtype=np.uint32)
            blocks.append(np.stack((np.full_like(firsts, number), firsts), axis=1))
        self._num_runs = len(runs)
        self._grid = (sum(map(len, blocks)), self._shape.column_tiles)
        offsets = np.arange(0, (batch + 1) * hotness, hotness, dtype=np.uint32)
        uploads = (np.concatenate(blocks).tobytes(), offsets.tobytes(), b"".join(runs), bytes(16))
        self._blocks, self._offsets, self._runs, self._counters = (self.own(rows.upload(one)) for one in uploads)
        self._out = self.own(rows.card.allocate(self._candidates * self._width * OUT_BYTES[out_dtype]))
        self._arenas: dict[int, ArenaParams] = {}

    @property
    def num_values(self) -> int:
        """Count the rows that a launch looks up."""
        return self.batch * self.hotness

    def set_of(self, number: int) -> torch.Tensor:
        """View the values of a set, int32 [num_values], on the card."""
        first = 4 * number * self.num_values
        return self.rows.card.tensor(self._values, first, (self.num_values,), torch.int32)

    def out(self) -> torch.Tensor:
        """Return what launches have written, [batch, dim]."""
        dim = self.rows.embedding_dim
        features = self._matrix()[:, : self._num_runs * dim].view(self._candidates, self._num_runs, dim)
        return features.transpose(0, 1).reshape(-1, dim)[: self.batch]

    def _matrix(self) -> torch.Tensor:
        """View where launches write, [candidates, columns]."""
        shape = (self._candidates, self._width)
        return self.rows.card.tensor(self._out, 0, shape, TORCH_DTYPES[self.out_dtype])

    def launch(self, num_cards: int, number: int) -> None:
        """Pool a set from the table as `num_cards` logical cards hold it."""
        if num_cards not in self._arenas:
            self._arenas[num_cards] = self.rows.arena(num_cards)
        batch = BatchParams(
            self._values.address + 4 * number * self.num_values, 0, self._offsets.address, self._runs.address,
            self._blocks.address, self._out.address, self._counters.address,
            self._grid[0], 0, OUT_DTYPES[self.out_dtype], self._shape.lanes_log2,
        )  # fmt: skip
        self.rows.card.launch(self._shape.kernel, self._grid, (self._arenas[num_cards], batch), self.rows.stream)

    def launch_all(self, num_cards: int) -> None:
        """Launch every set once."""
        for number in range(self.num_sets):
            self.launch(num_cards, number)

    def check(self, num_cards: int, number: int, seed: int = 0) -> float:
        """Pool a set into poisoned memory and compare bags with the reference.

        Returns:
            The largest error of a checked bag, as a share of its norm.

        Raises:
            WrongPoolingError: naming the configuration and what is wrong.
        """
        rows = self.rows
        counters = rows.card.tensor(self._counters, 0, (2,), torch.int64)
        with rows.card.torch_stream(rows.stream):
            counters.zero_()
            self._matrix().fill_(float("nan"))
        self.launch(num_cards, number)
        chosen = np.random.default_rng(seed).integers(0, self.batch, min(CHECKED_BAGS, self.batch))
        chosen[0], chosen[-1] = 0, self.batch - 1
        with rows.card.torch_stream(rows.stream):
            pooled_all = self.out()
            unwritten = int((~torch.isfinite(pooled_all)).sum())
            beyond = int((~torch.isnan(self._matrix())).sum()) - int((~torch.isnan(pooled_all)).sum())
            refused = counters.tolist()
            there = torch.from_numpy(chosen).to(rows.card.torch_device)
            pooled = pooled_all[there].cpu().to(torch.float64).numpy()
            bags = self.set_of(number).view(self.batch, self.hotness)[there].cpu().numpy().astype(np.int64)
        what = f"dim {rows.embedding_dim}, hotness {self.hotness}, batch {self.batch}, {num_cards} cards"
        if unwritten or beyond or any(refused):
            raise WrongPoolingError(
                f"{what}: {unwritten} elements not finite, {beyond} written beside the bags, "
                f"{refused[0]} values taken for out of range, "
                f"{refused[1]} for not here"
            )
        expected = rows.reference(bags, num_cards)
        norm = np.linalg.norm(expected, axis=1)
        largest = float((np.linalg.norm(pooled - expected, axis=1) / norm).max())
        if not largest <= TOLERANCE[self.out_dtype]:
            raise WrongPoolingError(f"{what}: a bag is {largest:.2e} off, allowed: {TOLERANCE[self.out_dtype]:.0e}")
        return largest


def asked_bytes(
    rows: RowsOnCard, hotness: int, batch: int, out_dtype: OutDtype = "fp32", places: bool = True
) -> dict[str, float]:
    """Count bytes that one launch asks for in sectors of 32, each row as often as it is looked up.

    A row: the sectors that its codes, scale and bias touch, in the mean over where a row begins in a sector. A place:
    one sector each, since rows are at random. Ids, offsets and pooled bags are contiguous and count as they are.
    """
    num_rows = hotness * batch
    parts = {
        "rows": sector_bytes(rows.format) * num_rows,
        "places": float(SECTOR_BYTES * num_rows * places),
        "ids_and_offsets": 4.0 * (num_rows + batch + 1),
        "pooled": float(batch * rows.embedding_dim * OUT_BYTES[out_dtype]),
    }
    return {**parts, "all": sum(parts.values())}
