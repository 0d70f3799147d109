"""What every lookup engine is: rows of one generation that can pool bags. CPU, CUDA and the reference are engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from shard_node.access_counts import LookupSampler
from shard_node.answer import Answer
from shard_node.bags import Bags, Float32Array, Int64Array, TableLayout
from shard_node.buckets import Message

Tier = Literal["ram", "disk", "card", "hot", "pinned"]
"""Where rows are: RAM, the snapshot's files, one card, a copy on every card, or pinned memory that cards read."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of rows that one card holds in one tier."""

    card: int
    tier: Tier
    size_bytes: int


@dataclass(frozen=True, slots=True)
class LookupCount:
    """Rows looked up in one table and tier since the engine was made."""

    table: str
    tier: Tier
    rows: int


class DiskUse(Message):
    """Reads of rows from disk since a model version was loaded, their bytes and failures; times of the last lookups.

    Lookups are by tier: `ram` had all of their rows in memory, `disk` waited for some. Times are 0 before the first.
    """

    model: str = ""
    version: int = 0
    reads: int
    size_bytes: int
    failed: int
    ram_p50_us: float
    ram_p99_us: float
    disk_p50_us: float
    disk_p99_us: float


@dataclass(frozen=True, slots=True)
class CardsUse:
    """The cards that an engine's rows lie on, and what their kernels found wrong.

    Attributes:
        peer_access: whether each reads every other's memory.
        outside_table, not_here: values, since the engine was made, that named no row of their table, or one that is on
            no card. Checks before the kernels keep both at 0; such a value pools as zeros.
    """

    name: str
    num_cards: int
    peer_access: bool
    outside_table: int
    not_here: int


def write_pieces(stored: npt.NDArray[np.uint8]) -> Iterator[slice]:
    """Yield parts of rows, uint8 [n, row_bytes], that are copied while lookups wait: some tenths of a millisecond."""
    step = max(1, (512 << 10) // stored.shape[1])
    return (slice(begin, begin + step) for begin in range(0, stored.shape[0], step))


class WritableRows(Protocol):
    """Holds rows that can be replaced while they are looked up. Thread-safe."""

    @property
    def layout(self) -> TableLayout:
        """The tables, in the order in which `Bags.keys` numbers them."""

    def write_rows(self, table: int | tuple[int, ...], rows: Int64Array, stored: npt.NDArray[np.uint8]) -> int:
        """Replace rows, between pooling: a `pool` sees each of them as it was before, or as it is now.

        Pooling waits for each of `write_pieces`, all rows of which change together. `table` is its number in the
        layout; or those of several, such as the slices of a wide one, whose rows of the same numbers change together.
        `rows` are int64 [n], ascending, none twice; those that another node holds are left out. `stored` is uint8
        [n, row_bytes], as the table's codec encodes them; of several tables, side by side.

        Returns how many of the rows are on this engine, those of several tables added up. Raises InvalidBagsError for
        no such table or row, or arrays of another shape or dtype, MemoryBudgetError if there is no memory for what has
        to be changed. Nothing was written then.
        """

    def update_keys(
        self, tables: Sequence[int], keys: Int64Array, stored: npt.NDArray[np.uint8] | None
    ) -> tuple[int, int]:
        """Give keys their rows, new ones too, or delete them, between pooling, as `write_rows` does.

        `tables` is one with keys, or the slices of one. `keys` are int64 [n], ascending, none twice; those of other
        nodes are left out. `stored` is as of `write_rows`, side by side; None deletes. Returns how many keys are on
        this engine, and how many of these were there. Raises as `write_rows`, and DeltaError (`key_capacity`) for more
        keys than the table may have here. Nothing was changed then.
        """


class Engine(WritableRows, Protocol):
    """Pools bags from the rows that it holds. Thread-safe: all but `close` may run in several threads at once."""

    def pool(self, bags: Bags) -> list[Float32Array]:
        """Sum the rows of each bag. Keys are tables, values are rows that this engine holds.

        Returns one float32 block per group of the layout, [bags of the group's tables, embedding_dim], bags in the
        order given. An empty bag gives zeros; a group without bags gives [0, embedding_dim]. Raises InvalidBagsError
        for a row that is outside its table or not on this engine.
        """

    def answer(self, bags: Bags, *, stored: bool = True) -> Answer:
        """Pool as `pool`, and tell which keys are missing.

        With `stored` rows of tables that `travel_as_stored` are given as they are, where this engine can. All of the
        answer is of one moment between two `write_rows`. Raises as `pool`.
        """

    def memory(self) -> tuple[MemoryUse, ...]:
        """Bytes held, by card and tier."""

    def rows_looked_up(self) -> tuple[LookupCount, ...]:
        """Counters by table and tier."""

    def disk_use(self) -> DiskUse | None:
        """Return what was read from disk, without model and version; None if no row is there."""

    @property
    def access(self) -> LookupSampler:
        """How often each row was looked up here. What is answered before it gets here, by hot rows, is not in it."""

    def cards(self) -> CardsUse | None:
        """Return the cards that its rows lie on; None if it pools on the CPU."""

    def close(self) -> None:
        """Frees the rows. No `pool` or `write_rows` may be running."""
