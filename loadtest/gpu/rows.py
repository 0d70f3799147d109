"""A large int8 table in the memory of a card, bags of its rows, pooled by the engine's kernel, and random reads of it.

A kernel that reads rows at random and computes their addresses by itself (`ceiling.cu`) is the ceiling of pooling.

No snapshot is read: exporting tens of gigabytes takes longer than all measurements together. Codes, scales and biases
are random, and the expected sums are computed from the same bytes on the host, in float64.
"""

from __future__ import annotations

import ctypes
import json
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
import numpy.typing as npt
import torch

from loader.snapshot.manifest import DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.store import replace_file
from loader.snapshot.tables import TableSpec
from serving.models.inputs import padded_width
from shard_node.bags import TableLayout
from shard_node.cuda import kernel_params
from shard_node.cuda.batch import BatchShapes

if TYPE_CHECKING:
    from shard_node.cuda.cupy_cards import Card, Cards, Memory, Stream

WITHOUT_PLACES = 0
"""In place of a number of logical cards: one card has all rows, and the kernel looks up no places."""
ROW_MULTIPLE = 64
"""The table has a multiple of so many rows, so that they split evenly over logical cards."""
PIECE_BYTES = 1 << 28
CHECKED_BAGS = 64
TOLERANCE = 1e-2
"""Of a checked bag in bfloat16, as a fraction of its norm, to the sum in float64."""
FEATURES, DENSE_INPUTS = 26, 13
"""Of DLRM-v2: a candidate's row of the dense model's input is `[26 features | 13 dense inputs | zeros]`."""


class WrongAnswerError(AssertionError):
    """A kernel's sums, or a model's scores, are not the reference's."""


class MemoryStack(ExitStack):
    """A context whose memory of the card is freed at its end, when the stream's work is done."""

    def __init__(self, card: Card, stream: Stream) -> None:
        super().__init__()
        self.card, self.stream = card, stream

    def allocate(self, size_bytes: int) -> Memory:
        """Return memory of the card."""
        memory = self.card.allocate(size_bytes)
        self.callback(memory.free)
        self.callback(self.stream.synchronize)
        return memory

    def upload(self, content: bytes) -> Memory:
        """Return memory of the card with this content."""
        memory = self.allocate(len(content))
        with self.card.torch_stream(self.stream):
            source = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            self.card.tensor(memory, 0, (len(content),), torch.uint8).copy_(source)
        self.stream.synchronize()
        return memory


class RowsOnCard(MemoryStack):
    """Random int8 rows of at least `table_bytes` as a snapshot stores them, in one allocation of the first card.

    Row r belongs to logical card r mod n, in slot r div n; each of the n has an equal stretch of the allocation. So the
    same bytes are the table of any number of logical cards.
    """

    def __init__(self, cards: Cards, embedding_dim: int, table_bytes: int) -> None:
        super().__init__(cards.cards[0], cards.cards[0].stream())
        self.cards, self.embedding_dim = cards, embedding_dim
        self.format = kernel_params.RowFormat.of("int8", embedding_dim)
        self.count = -(-table_bytes // (self.format.row_bytes * ROW_MULTIPLE)) * ROW_MULTIPLE
        self.generator = torch.Generator(self.card.torch_device).manual_seed(embedding_dim)
        self._arenas: dict[int, kernel_params.ArenaParams] = {}
        self.memory = self.allocate(self.count * self.format.stride)
        rows_per_piece = max(1, PIECE_BYTES // self.format.stride)
        with self.card.torch_stream(self.stream):
            for first in range(0, self.count, rows_per_piece):
                stored, scale_bias = self.stored(first, min(rows_per_piece, self.count - first))
                stored.random_(0, 256, generator=self.generator)
                scale_bias.uniform_(-0.5, 0.5, generator=self.generator)
                scale_bias[:, 0].add_(1).div_(255)
        self.stream.synchronize()

    def stored(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """View rows from slot `first` on: all bytes, uint8 [count, stride], and scale and bias, float32 [count, 2]."""
        begin, stride, column = first * self.format.stride, self.format.stride, self.format.tail_offset // 4
        stored = self.card.tensor(self.memory, begin, (count, stride), torch.uint8)
        floats = self.card.tensor(self.memory, begin, (count, stride // 4), torch.float32)
        return stored, floats[:, column : column + 2]

    def arena(self, num_cards: int) -> kernel_params.ArenaParams:
        """Return the kernel's view of the table on so many logical cards, or `WITHOUT_PLACES`; made once."""
        if num_cards in self._arenas:
            return self._arenas[num_cards]
        table = kernel_params.TableParams(num_rows=self.count, owner_after=0 if num_cards else 1)
        num_owners = max(1, num_cards)
        card_bytes = self.count // num_owners * self.format.stride
        owners = [self.memory.address + owner * card_bytes for owner in range(num_owners)]
        self._arenas[num_cards] = kernel_params.ArenaParams(
            rows=(ctypes.c_uint64 * kernel_params.MAX_OWNERS)(*owners),
            places=self._places(num_cards).address if num_cards else 0,
            tables=self.upload(bytes(table)).address,
            starts=self.upload(bytes(8 * (num_owners + 2))).address,
            num_tables=1,
            num_cards=num_owners,
            owner_bits=kernel_params.owner_bits(num_owners),
            row_stride=self.format.stride,
            embedding_dim=self.embedding_dim,
        )
        return self._arenas[num_cards]

    def _places(self, num_cards: int) -> Memory:
        """Return uint32 [count]: the slot and the owner of each row."""
        places = self.allocate(4 * self.count)
        with self.card.torch_stream(self.stream):
            for first in range(0, self.count, PIECE_BYTES // 8):
                end = min(first + PIECE_BYTES // 8, self.count)
                row = torch.arange(first, end, dtype=torch.int64, device=self.card.torch_device)
                slot, owner = row.div(num_cards, rounding_mode="floor"), row.remainder(num_cards)
                # int64 to int32 keeps the low 32 bits, which the kernel reads as uint32.
                encoded = (slot << kernel_params.owner_bits(num_cards) | owner).to(torch.int32)
                self.card.tensor(places, 4 * first, (end - first,), torch.int32).copy_(encoded)
        return places

    def reference(self, bags: torch.Tensor, num_cards: int) -> torch.Tensor:
        """Return the sums, float64 [n, dim], of bags, int32 [n, hotness] of rows, computed without the places."""
        owners = max(1, num_cards)
        slots = (bags % owners * (self.count // owners) + bags // owners).view(-1)
        stored, scale_bias = (part[slots].double() for part in self.stored(0, self.count))
        rows = stored[:, : self.embedding_dim] * scale_bias[:, :1] + scale_bias[:, 1:]
        return rows.view(*bags.shape, -1).sum(1)


class CardBags(MemoryStack):
    """Batches of `batch` bags of `hotness` rows; `ids` has int32 [sets, batch, hotness] of them.

    Sums are written as the product writes them, in bfloat16 into the dense model's input: each of its features has an
    equal number of the bags, as so many candidates.
    """

    def __init__(self, rows: RowsOnCard, ids: Memory, batch: int, hotness: int) -> None:
        super().__init__(rows.card, rows.stream)
        self.rows, self.batch, self.hotness = rows, batch, hotness
        self._ids = ids
        table = TableSpec(
            name="rows", num_embeddings=rows.count, embedding_dim=rows.embedding_dim, feature_names=("row",)
        )
        features, dense_model = (FeatureSpec(name="row", side="candidate"),), DenseModelSpec(kind="mlp")
        spec = ModelSpec(model="bench", tables=(table,), features=features, dense_model=dense_model)
        (self._shape,) = BatchShapes(TableLayout.of(spec)).arenas
        self._candidates = -(-batch // FEATURES)
        self._width = padded_width(FEATURES * rows.embedding_dim + DENSE_INPUTS)
        runs: list[bytes] = []
        blocks: list[tuple[int, int]] = []
        for first in range(0, batch, self._candidates):
            count = min(self._candidates, batch - first)
            blocks += [(len(runs), bag) for bag in range(0, count, self._shape.bags_per_block)]
            column = len(runs) * rows.embedding_dim
            run = kernel_params.RunParams(0, first, count, kernel_params.MODES["sum"], column, self._width)
            runs.append(bytes(run))
        self._num_runs, self._grid = len(runs), (len(blocks), self._shape.column_tiles)
        offsets = np.arange(0, (batch + 1) * hotness, hotness, dtype=np.uint32)
        self._blocks = self.upload(np.array(blocks, np.uint32).tobytes())
        self._offsets, self._runs = self.upload(offsets.tobytes()), self.upload(b"".join(runs))
        self._counters = self.upload(bytes(16))
        self._matrix_memory = self.allocate(self._candidates * self._width * kernel_params.OUT_BYTES["bf16"])

    def ids(self, number: int) -> torch.Tensor:
        """View the ids of a set, int32 [batch, hotness], on the card."""
        first = 4 * number * self.batch * self.hotness
        return self.card.tensor(self._ids, first, (self.batch, self.hotness), torch.int32)

    def sums(self) -> torch.Tensor:
        """Return what the last launch wrote, [batch, dim]."""
        dim = self.rows.embedding_dim
        features = self._matrix()[:, : self._num_runs * dim].view(self._candidates, self._num_runs, dim)
        return features.transpose(0, 1).reshape(-1, dim)[: self.batch]

    def _matrix(self) -> torch.Tensor:
        return self.card.tensor(self._matrix_memory, 0, (self._candidates, self._width), torch.bfloat16)

    def launch(self, num_cards: int, number: int) -> None:
        """Pool a set from the table on so many logical cards, or `WITHOUT_PLACES`."""
        batch = kernel_params.BatchParams(
            values=self._ids.address + 4 * number * self.batch * self.hotness,
            offsets=self._offsets.address,
            runs=self._runs.address,
            blocks=self._blocks.address,
            out=self._matrix_memory.address,
            counters=self._counters.address,
            num_blocks=self._grid[0],
            out_dtype=kernel_params.OUT_DTYPES["bf16"],
            lanes_log2=self._shape.lanes_log2,
        )
        self.card.launch(self._shape.kernel, self._grid, (self.rows.arena(num_cards), batch), self.stream)

    def check(self, num_cards: int, number: int) -> float:
        """Pool a set into memory full of NaN, and return the largest error of some bags, a fraction of the norm.

        Raises WrongAnswerError, with the configuration and what is wrong.
        """
        with self.card.torch_stream(self.stream):
            self._matrix().fill_(float("nan"))
        self.launch(num_cards, number)
        with self.card.torch_stream(self.stream):
            error = self.error(self.sums(), number, num_cards)
        if not error <= TOLERANCE:
            where = f"dim {self.rows.embedding_dim}, {self.batch} bags of {self.hotness}, {num_cards} cards"
            raise WrongAnswerError(f"{where}: a bag is {error:.2e} off, allowed: {TOLERANCE:.0e}")
        return error

    def error(self, sums: torch.Tensor, number: int, num_cards: int = WITHOUT_PLACES) -> float:
        """Return the largest error of some bags of a set's sums, [batch, dim], as a fraction of their norms."""
        chosen = torch.linspace(0, self.batch - 1, CHECKED_BAGS, device=sums.device).long()
        expected = self.rows.reference(self.ids(number)[chosen], num_cards)
        return float(((sums[chosen].double() - expected).norm(dim=1) / expected.norm(dim=1)).max())


SOURCE = Path(__file__).with_name("ceiling.cu")
GATHER_KERNELS = {4: "gather_4", 8: "gather_8"}
"""By the number of rows that a thread has in flight."""
CHECKED_GROUPS = 64


class GatherParams(ctypes.Structure):
    """The parameters of a launch, by value; `chunks` are 16 bytes of a row, each read by a thread.

    Read i is of row `mixed(first + i) * num_rows >> 32`. `rows_per_group` reads are of a lane group of 1 << lanes_log2
    threads. sums: uint32 [threads], of the words read.
    """

    _fields_ = (
        ("rows", ctypes.c_uint64),
        ("sums", ctypes.c_uint64),
        ("num_rows", ctypes.c_uint32),
        ("row_stride", ctypes.c_uint32),
        ("chunks", ctypes.c_uint32),
        ("tail_offset", ctypes.c_uint32),
        ("first", ctypes.c_uint32),
        ("num_reads", ctypes.c_uint32),
        ("rows_per_group", ctypes.c_uint32),
        ("lanes_log2", ctypes.c_uint32),
    )


class RandomGather(MemoryStack):
    """Launches that read `num_reads` random rows each, those of a set by its number.

    A lane group reads `rows_per_group` one after the other, a thread `in_flight` at a time, a key of GATHER_KERNELS.
    """

    def __init__(self, rows: RowsOnCard, num_reads: int, rows_per_group: int, in_flight: int) -> None:
        super().__init__(rows.card, rows.stream)
        rows.cards.load_kernels(SOURCE, tuple(GATHER_KERNELS.values()))
        self.kernel = GATHER_KERNELS[in_flight]
        self._rows, self._num_reads, self._rows_per_group = rows, num_reads, rows_per_group
        self._chunks = min(rows.format.chunks, kernel_params.MAX_LANES)
        self._lanes_log2 = (self._chunks - 1).bit_length()
        groups = -(-num_reads // rows_per_group)
        self._blocks = -(-(groups << self._lanes_log2) // kernel_params.THREADS_PER_BLOCK)
        self._num_threads = self._blocks * kernel_params.THREADS_PER_BLOCK
        self._sums = self.allocate(4 * self._num_threads)

    def launch(self, number: int) -> None:
        """Read the rows of a set."""
        rows = self._rows
        params = GatherParams(
            rows=rows.memory.address,
            sums=self._sums.address,
            num_rows=rows.count,
            row_stride=rows.format.stride,
            chunks=self._chunks,
            tail_offset=rows.format.tail_offset,
            first=number * self._num_reads & 0xFFFFFFFF,
            num_reads=self._num_reads,
            rows_per_group=self._rows_per_group,
            lanes_log2=self._lanes_log2,
        )
        self.card.launch(self.kernel, (self._blocks, 1), (params,), self.stream)

    def check(self, number: int) -> None:
        """Compare the sums of some lane groups with those of the same rows, read by torch. Raises WrongAnswerError."""
        groups = -(-self._num_reads // self._rows_per_group)
        chosen = np.random.default_rng(0).integers(0, groups, CHECKED_GROUPS)
        chosen[-1] = groups - 1  # It may have fewer rows.
        reads = chosen[:, None] * self._rows_per_group + np.arange(self._rows_per_group)
        numbers = rows_read(reads + number * self._num_reads, self._rows.count)
        with self.card.torch_stream(self.stream):
            sums = self.card.tensor(self._sums, 0, (self._num_threads,), torch.int32).fill_(-1)
            self.launch(number)
            lanes = sums.cpu().numpy().view(np.uint32).reshape(-1, 1 << self._lanes_log2)[chosen, : self._chunks]
            stored, _ = self._rows.stored(0, self._rows.count)
            words = stored[torch.from_numpy(numbers).to(self.card.torch_device)].cpu().numpy().view(np.uint32)
        words[reads >= self._num_reads] = 0
        codes = words[..., : 4 * self._chunks].reshape(*reads.shape, self._chunks, 4).sum((1, 3), np.uint32)
        tails = words[..., self._rows.format.tail_offset // 4 :][..., :2].sum((1, 2), np.uint32)
        if not np.array_equal(lanes, codes + tails[:, None]):
            raise WrongAnswerError(f"{self.kernel}: sums {lanes}, expected {codes + tails[:, None]}")


def rows_read(reads: npt.NDArray[np.int64], num_rows: int) -> npt.NDArray[np.int64]:
    """Return the rows, int64, of reads, int64, counted from 0 over all launches."""
    mixed = reads.astype(np.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = (mixed ^ mixed >> np.uint32(shift)) * np.uint32(factor)
    mixed ^= mixed >> np.uint32(16)
    return (mixed.astype(np.uint64) * np.uint64(num_rows) >> np.uint64(32)).astype(np.int64)


Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class BenchSize:
    """What the parts measure: pooling a grid of dims, hotness, batches and logical cards, and ranking a workload.

    `table_bytes` are of int8 rows; `cell_s` is for one configuration of pooling, `requests` for one of ranking.
    """

    table_bytes: int = 10_000_000_000
    dims: tuple[int, ...] = (128, 64)
    hotness: tuple[int, ...] = (1, 20, 100)
    batches: tuple[int, ...] = (256, 1024, 8192, 65536)
    logical_cards: tuple[int, ...] = (1, 2, 4, 8)
    cell_s: float = 2.0
    workload: str = "dlrm-v2:0.01"
    candidates: tuple[int, ...] = (100, 500)
    requests: int = 300


QUICK = BenchSize(
    table_bytes=2_000_000_000,
    hotness=(1, 20),
    batches=(8192, 65536),
    logical_cards=(1, 8),
    cell_s=0.5,
    workload="dlrm-v2:0.002",
    requests=100,
)


class Results:
    """Rows of all parts, and the status of each part: `running`, `done`, or `failed: ` and why.

    The file, if there is one, is written anew after each row, under a head of date, command and machine.
    """

    def __init__(self, path: Path | None, head: Row) -> None:
        self.path, self.head = path, head
        self.status: dict[str, str] = {}
        self.rows: list[Row] = []

    def add(self, part: str, row: Row) -> None:
        """Keep a row, and print it."""
        self.rows.append({"part": part, **row})
        figures = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in row.items()}
        click.echo(f"{part}: {', '.join(f'{name} {figure}' for name, figure in figures.items())}")
        self.save()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Record how a part ends; its rows are kept."""
        self.status[name] = "running"
        self.save()
        try:
            yield
            self.status[name] = "done"
        except Exception as error:  # Any failure is a result of the bench, and the other parts go on.
            self.status[name] = f"failed: {type(error).__name__}: {error}"
            click.echo(traceback.format_exc())
        self.save()

    def save(self) -> None:
        """Write the file in one step."""
        if self.path is not None:
            content = {**self.head, "status": self.status, "rows": self.rows}
            text = json.dumps(content, indent=1) + "\n"
            replace_file(self.path, text.encode(), self.path.with_name(f"{self.path.name}.part"), durable=False)
