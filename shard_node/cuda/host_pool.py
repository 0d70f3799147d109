"""Pooling for callers on the host: bags go up, float32 blocks come down. Batches of any size, one at a time."""

from __future__ import annotations

import numpy as np

from shard_node.bags import Float32Array, Int64Array, KeyedBags
from shard_node.cuda.batch import BatchLayout, BatchShapes, BatchViews, RunTable
from shard_node.cuda.cards import Memory, PinnedMemory
from shard_node.cuda.kernel_params import MODES
from shard_node.cuda.lane import Lane
from shard_node.cuda.output_runs import OutputRuns
from shard_node.cuda.upload_buffer import UploadBuffer, capacity_for

ELEMENTS_PER_CHUNK = 4


class HostPool:
    """A lane with buffers that grow to what is asked of it. Used by one thread at a time.

    Args:
        lane: belongs to it.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._upload = UploadBuffer(lane.rows.cards, lane.card, lane.stream)
        self._out: Memory | None = None
        self._down: PinnedMemory | None = None

    def pool(self, bags: KeyedBags, tables: Int64Array) -> list[Float32Array]:
        """As `Engine.pool`, of checked bags of which there is at least one.

        Args:
            bags: keys are tables.
            tables: int64 [S], the same keys.
        """
        runs, group_elements = block_runs(self._lane.rows.shapes, bags, tables)
        try:
            down = self._pool(bags, RunTable(self._lane.rows.shapes, runs), runs.out_bytes)
        except BaseException:
            # What was put on the stream may still use the buffers that the next batch is packed into.
            self._lane.stream.synchronize()
            raise
        blocks = []
        for (first, end), group in zip(group_elements, self._lane.rows.shapes.layout.groups, strict=True):
            blocks.append(down[first:end].reshape(-1, group.embedding_dim).copy())
        return blocks

    def _pool(self, bags: KeyedBags, table: RunTable, out_bytes: int) -> Float32Array:
        lane = self._lane
        blocks = table.blocks(bags)
        layout = BatchLayout.tight(bags, blocks)
        views = BatchViews(self._upload.reserve(layout.size_bytes), layout)
        views.write_constant(table)
        views.pack(bags, blocks)
        out, down = self._outputs(out_bytes)

        def put() -> None:
            address = self._upload.send(layout.size_bytes)
            lane.put(lane.launches(layout, address, out.address, "fp32"))

        lane.launch(put)
        lane.card.copy_to_host(down, 0, out.address, out_bytes, lane.stream)
        lane.stream.record().synchronize()
        return down.array[:out_bytes].view(np.float32)

    def _outputs(self, size_bytes: int) -> tuple[Memory, PinnedMemory]:
        # Nothing is under way: every batch before was waited for.
        if self._out is None or self._down is None or self._down.size_bytes < size_bytes:
            self._free_outputs()
            capacity = capacity_for(size_bytes)
            self._down = self._lane.rows.cards.allocate_pinned(capacity)
            self._out = self._lane.card.allocate(capacity)
        return self._out, self._down

    def _free_outputs(self) -> None:
        out, down, self._out, self._down = self._out, self._down, None, None
        if out is not None:
            out.free()
        if down is not None:
            down.free()

    def close(self) -> None:
        """Waits for the lane, and gives everything back. Idempotent."""
        self._lane.close()
        self._upload.free()
        self._free_outputs()


def block_runs(shapes: BatchShapes, bags: KeyedBags, tables: Int64Array) -> tuple[OutputRuns, list[tuple[int, int]]]:
    """Runs that write one block [bags of the group, embedding_dim] for each group, all behind one another.

    Args:
        shapes: of the layout.
        bags: keys are tables.
        tables: int64 [S], the same keys.

    Returns:
        The runs, and for each group the elements [first, end) of its block; blocks are aligned to 16 bytes.
    """
    dims = shapes.dim_of_table[tables]
    elements = bags.bags_per_key * dims
    ends = np.zeros(tables.size + 1, np.int64)
    np.cumsum(elements, out=ends[1:])
    groups = shapes.layout.groups
    first_keys = np.searchsorted(tables, [*(group.first_table for group in groups), groups[-1].end_table])
    edges = ends[first_keys]
    sizes = np.diff(edges)
    room = -(-sizes // ELEMENTS_PER_CHUNK) * ELEMENTS_PER_CHUNK
    starts = np.cumsum(room) - room
    offsets = ends[:-1] + (starts - edges[:-1])[shapes.arena_of_table[tables]]
    modes = np.full(tables.size, MODES["sum"], np.int64)
    runs = OutputRuns(tables, modes, offsets, dims, "fp32", int(room.sum()))
    return runs, list(zip(starts.tolist(), (starts + sizes).tolist(), strict=True))
