"""Whether the chunks that ranks saved of a tensor make it up: none of it missing, none of it twice."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from loader.errors import CheckpointError, cut

# Cells of the grid that all chunks' borders make: many chunks along both dims would need more.
MAX_CELLS = 1 << 24


def check_chunks(where: str, shape: tuple[int, ...], chunks: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """Raises CheckpointError unless every element of `shape` is in exactly one chunk.

    The borders of all chunks cut the shape into a grid whose cells are each wholly inside or outside of every chunk; it
    is enough to count the chunks of each cell.

    Args:
        where: names the tensor in errors.
        shape: of the whole tensor.
        chunks: offset of each chunk's first element, and its sizes.
    """
    for offsets, sizes in chunks:
        fits = len(offsets) == len(sizes) == len(shape) and all(
            start >= 0 and size >= 0 and start + size <= dim
            for start, size, dim in zip(offsets, sizes, shape, strict=True)
        )
        if not fits:
            chunk = f"chunk at {cut(list(offsets))} of size {cut(list(sizes))}"
            raise CheckpointError(f"{where}: {chunk} is not inside its shape {cut(list(shape))}")
    borders = [
        np.unique([0, size, *(edge for start, length in chunks for edge in (start[dim], start[dim] + length[dim]))])
        for dim, size in enumerate(shape)
    ]
    cells = [len(edges) - 1 for edges in borders]
    if math.prod(cells) > MAX_CELLS:
        raise CheckpointError(f"{where}: {len(chunks)} chunks cut it into {cells} cells; at most {MAX_CELLS} in all")
    count = np.zeros(cells, np.int64)
    for offsets, sizes in chunks:
        region = tuple(
            slice(np.searchsorted(edges, start), np.searchsorted(edges, start + size))
            for edges, start, size in zip(borders, offsets, sizes, strict=True)
        )
        count[region] += 1
    wrong = np.argwhere(count != 1)
    if len(wrong):
        cell = tuple(wrong[0].tolist())
        part = [f"{edges[at]}:{edges[at + 1]}" for edges, at in zip(borders, cell, strict=True)]
        found = f"is in {count[cell]} of its {len(chunks)} chunks" if count[cell] else "is in none of its chunks"
        raise CheckpointError(f"{where} {list(shape)}: the part [{', '.join(part)}] {found}")
