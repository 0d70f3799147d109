"""Row updates of one engine: packed once, sent to every card, and put in order with lookups."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from shard_node.bags import Int64Array
from shard_node.cuda.card_rows import CardRows
from shard_node.cuda.kernel_params import CHUNK_BYTES
from shard_node.cuda.row_upload import RowUpload
from shard_node.cuda.upload_buffer import capacity_for

FIRST_CAPACITY_BYTES = 1 << 20
NUM_UPLOADS = 2


class RowWriter:
    """Writes rows of an engine wherever they lie: on one card, on all, or in pinned memory.

    Cards are sent all rows and take those that are theirs: a delta is small, and the host keeps no places.

    Args:
        rows: of the engine.

    Raises:
        MemoryBudgetError: no room for the first buffers; nothing is held then.
    """

    def __init__(self, rows: CardRows) -> None:
        self._rows = rows
        self._one_writer = threading.Lock()
        self._uploads: list[RowUpload] = []
        try:
            for _ in range(NUM_UPLOADS):
                self._uploads.append(RowUpload(rows.cards, rows.order.streams, FIRST_CAPACITY_BYTES))
        except BaseException:
            self.free()
            raise

    def write(self, table: int, rows: Int64Array, stored: npt.NDArray[np.uint8]) -> int:
        """As `Engine.write_rows`."""
        checks = self._rows.checks
        checks.limits.check_rows(table, rows, stored)
        here = checks.here(table, rows)
        if here is not None and not here.all():
            rows, stored = rows[here], stored[here]
        if rows.size:
            with self._one_writer:
                self._write(table, rows, stored)
        return rows.size

    def free(self) -> None:
        """Waits for what is under way, and gives the buffers back. Idempotent."""
        uploads, self._uploads = self._uploads, []
        for upload in uploads:
            upload.free()

    def _write(self, table: int, rows: Int64Array, stored: npt.NDArray[np.uint8]) -> None:
        shapes, order = self._rows.shapes, self._rows.order
        arena = self._rows.arenas[int(shapes.arena_of_table[table])]
        number = int(shapes.table_in_arena[table])
        stored_at = -(-4 * rows.size // CHUNK_BYTES) * CHUNK_BYTES
        size_bytes = stored_at + rows.size * arena.format.stride
        upload = self._upload(size_bytes)
        np.copyto(upload.array[: 4 * rows.size].view(np.uint32), rows, casting="unsafe")
        arena.format.relay(stored, upload.array[stored_at:size_bytes].reshape(rows.size, arena.format.stride))
        addresses = [upload.send(card, 0, size_bytes) for card in range(len(order.streams))]

        def put() -> None:
            for card, address in enumerate(addresses):
                arena.write(
                    card, number, address, address + stored_at, rows.size, order.streams[card], writes_host=card == 0
                )

        try:
            order.write(put)
        finally:
            for card in range(len(addresses)):
                upload.used(card)

    def _upload(self, size_bytes: int) -> RowUpload:
        """The buffer that was sent the longest ago, free again and large enough."""
        upload = self._uploads.pop(0)
        try:
            upload.wait()
            if upload.capacity_bytes < size_bytes:
                larger = RowUpload(self._rows.cards, self._rows.order.streams, capacity_for(size_bytes))
                upload.free()
                upload = larger
        finally:
            self._uploads.append(upload)
        return upload
