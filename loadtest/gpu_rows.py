"""One large int8 table on a card, made there: its rows, its places for any number of logical cards, its reference.

No snapshot is read: exporting tens of gigabytes takes longer than all measurements together. Codes, scales and biases
are random, and what a bag must come to is computed from the same bytes on the host, in float64.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch

from loader.manifest import DenseModelSpec, FeatureSpec, ModelSpec, TableSpec
from shard_node.cuda.cards import Card, Cards, Memory, PinnedMemory, Stream
from shard_node.cuda.kernel_params import MAX_OWNERS, ArenaParams, TableParams
from shard_node.cuda.places import owner_bits, pinned_owner
from shard_node.cuda.row_format import RowFormat
from shard_node.table_layout import TableLayout

ROW_MULTIPLE = 64
"""Rows of the table are a multiple of this, so that they split evenly over logical cards."""
_PIECE_BYTES = 1 << 28


def one_table_layout(embedding_dim: int, num_rows: int) -> TableLayout:
    """The layout of a model with one int8 table."""
    table = TableSpec(name="rows", num_embeddings=num_rows, embedding_dim=embedding_dim, feature_names=("row",))
    features = (FeatureSpec(name="row", side="candidate"),)
    return TableLayout.of(
        ModelSpec(model="bench", tables=(table,), features=features, dense_model=DenseModelSpec(kind="mlp"))
    )


@dataclass(slots=True)
class Placed:
    """The table as `num_cards` logical cards hold it; the host's rows are behind all of theirs."""

    num_cards: int
    places: Memory
    tables: Memory
    starts: Memory

    def free(self) -> None:
        """Gives its memory back."""
        for memory in (self.places, self.tables, self.starts):
            memory.free()


class RowsOnCard:
    """Rows 0 .. card_rows - 1 on the card; `host_rows` more in pinned memory. A context that frees them.

    Row r of the card's lies with logical card r mod n, there in slot r div n; each of the n has an equal stretch of one
    allocation. So the same bytes are the table of any number of logical cards.
    """

    def __init__(self, cards: Cards, card: Card, embedding_dim: int, table_bytes: int, host_bytes: int) -> None:
        self.cards, self.card, self.embedding_dim = cards, card, embedding_dim
        self.format = RowFormat.of("int8", embedding_dim)
        self.stride, self._tail = self.format.stride, self.format.tail_offset
        self.card_rows = -(-table_bytes // (self.format.row_bytes * ROW_MULTIPLE)) * ROW_MULTIPLE
        self.host_rows = min(host_bytes // self.stride, self.card_rows // 2)
        self.stream: Stream = card.stream()
        self.generator = torch.Generator(card.torch_device).manual_seed(embedding_dim)
        self._placed: dict[int, Placed] = {}
        self._memory: Memory = card.allocate(self.card_rows * self.stride)
        self._pinned: PinnedMemory | None = None
        try:
            self._fill()
            if self.host_rows:
                self._pinned = cards.allocate_pinned(self.host_rows * self.stride)
                # The last of the card's rows: slot i of the host is then no row that slot i of a card is.
                source = self._memory.address + (self.card_rows - self.host_rows) * self.stride
                card.copy_to_host(self._pinned, 0, source, self._pinned.size_bytes, self.stream)
                self.stream.synchronize()
        except BaseException:
            self.free()
            raise

    def __enter__(self) -> RowsOnCard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free()

    def _fill(self) -> None:
        rows_a_piece = max(1, _PIECE_BYTES // self.stride)
        first_float = self._tail // 4
        with self.card.torch_stream(self.stream):
            for first in range(0, self.card_rows, rows_a_piece):
                rows = min(rows_a_piece, self.card_rows - first)
                begin = first * self.stride
                codes = self.card.tensor(self._memory, begin, (rows * self.stride,), torch.uint8)
                codes.random_(0, 256, generator=self.generator)
                floats = self.card.tensor(self._memory, begin, (rows, self.stride // 4), torch.float32)
                random = torch.rand((2, rows), device=self.card.torch_device, generator=self.generator)
                floats[:, first_float] = random[0].add(0.5).div(255)
                floats[:, first_float + 1] = random[1].sub(0.5)
        self.stream.synchronize()

    def placed(self, num_cards: int) -> Placed:
        """Places of all rows over `num_cards` logical cards; made once."""
        if num_cards not in self._placed:
            self._placed[num_cards] = self._place(num_cards)
        return self._placed[num_cards]

    def _place(self, num_cards: int) -> Placed:
        bits, rows = owner_bits(num_cards), self.card_rows + self.host_rows
        places = self.card.allocate(4 * rows)
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
        starts = np.zeros(num_cards + 2, np.uint64)
        placed = Placed(num_cards, places, self.upload(bytes(TableParams(0, rows))), self.upload(starts.tobytes()))
        self.stream.synchronize()
        return placed

    def upload(self, content: bytes) -> Memory:
        """Memory of the card with this content."""
        memory = self.card.allocate(len(content))
        with self.card.torch_stream(self.stream):
            source = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            self.card.tensor(memory, 0, (len(content),), torch.uint8).copy_(source)
        self.stream.synchronize()
        return memory

    def arena(self, num_cards: int) -> ArenaParams:
        """What the kernel takes."""
        placed = self.placed(num_cards)
        owners = (ctypes.c_uint64 * MAX_OWNERS)()
        for owner in range(num_cards):
            owners[owner] = self._memory.address + owner * (self.card_rows // num_cards) * self.stride
        owners[pinned_owner(num_cards)] = self._pinned.address if self._pinned is not None else 0
        return ArenaParams(
            owners, placed.places.address, placed.tables.address, placed.starts.address,
            1, num_cards, owner_bits(num_cards), self.stride, self.embedding_dim,
        )  # fmt: skip

    def stored(self, rows: npt.NDArray[np.int64], num_cards: int) -> npt.NDArray[np.uint8]:
        """uint8 [n, stride]: the bytes of rows, found without the places."""
        found = np.empty((rows.size, self.stride), np.uint8)
        on_card = rows < self.card_rows
        slots = rows[on_card] % num_cards * (self.card_rows // num_cards) + rows[on_card] // num_cards
        with self.card.torch_stream(self.stream):
            table = self.card.tensor(self._memory, 0, (self.card_rows, self.stride), torch.uint8)
            found[on_card] = table[torch.from_numpy(slots).to(self.card.torch_device)].cpu().numpy()
        if self._pinned is not None:
            host = self._pinned.array.reshape(self.host_rows, self.stride)
            found[~on_card] = host[rows[~on_card] - self.card_rows]
        return found

    def reference(self, bags: npt.NDArray[np.int64], num_cards: int) -> npt.NDArray[np.float64]:
        """float64 [n, dim]: sums of bags, int64 [n, hotness] of rows, from the bytes themselves."""
        stored = self.stored(bags.reshape(-1), num_cards)
        end = self._tail + self.format.tail_bytes
        scale_bias = np.ascontiguousarray(stored[:, self._tail : end]).view(np.float32).astype(np.float64)
        rows = stored[:, : self.embedding_dim] * scale_bias[:, :1] + scale_bias[:, 1:]
        summed: npt.NDArray[np.float64] = rows.reshape(*bags.shape, self.embedding_dim).sum(axis=1)
        return summed

    def floats(self, first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """[count, dim] of the card's rows `first` and on, as one logical card has them, dequantised there."""
        begin = first * self.stride
        stored = self.card.tensor(self._memory, begin, (count, self.stride), torch.uint8)
        scale_bias = self.card.tensor(self._memory, begin, (count, self.stride // 4), torch.float32)
        column = self._tail // 4
        scale, bias = scale_bias[:, column, None], scale_bias[:, column + 1, None]
        return stored[:, : self.embedding_dim].to(torch.float32).mul_(scale).add_(bias).to(dtype)

    def free(self) -> None:
        """Gives all memory back. Idempotent."""
        self.stream.synchronize()
        for placed in self._placed.values():
            placed.free()
        self._placed.clear()
        if self._pinned is not None:
            self._pinned.free()
        self._memory.free()
