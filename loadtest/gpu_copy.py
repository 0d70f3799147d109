"""Part 1 of the GPU bench: how fast the device copies, which is the ceiling of everything that reads rows."""

from __future__ import annotations

import torch

from loadtest.gpu_report import Work
from loadtest.gpu_size import BenchSize
from loadtest.gpu_timing import clock_name, time_in_turns
from shard_node.cuda.cards import Cards, Memory, PinnedMemory

SECONDS_A_COPY = 1.0
_PIECE_BYTES = 1 << 28
DEVICE, UP, DOWN = "within the device", "pinned to device", "device to pinned"


def measure(work: Work, cards: Cards, size: BenchSize) -> None:
    """Copies within the device (bytes read and written), and over the bus each way (bytes moved)."""
    card = cards.cards[0]
    stream = card.stream()
    work.part.facts["clock"] = clock_name(card)
    work.note("Within the device, bytes read and bytes written are both counted; over the bus, bytes moved.")
    host_bytes = min(size.copy_bytes, size.pinned_bytes) // 4
    taken: list[Memory] = []
    try:
        source, target = card.allocate(size.copy_bytes), card.allocate(size.copy_bytes)
        taken += [source, target]
        pinned: PinnedMemory = cards.allocate_pinned(host_bytes)
        taken.append(pinned)
        generator = torch.Generator(card.torch_device).manual_seed(1)
        with card.torch_stream(stream):
            for memory in (source, target):
                # Random bytes: copies of zeros can be faster than copies of anything else.
                whole = card.tensor(memory, 0, (size.copy_bytes,), torch.uint8)
                for first in range(0, size.copy_bytes, _PIECE_BYTES):
                    whole[first : first + _PIECE_BYTES].random_(0, 256, generator=generator)
        stream.synchronize()

        def within() -> None:
            with card.torch_stream(stream):
                to = card.tensor(target, 0, (size.copy_bytes,), torch.uint8)
                to.copy_(card.tensor(source, 0, (size.copy_bytes,), torch.uint8))

        copies = {
            DOWN: (lambda: card.copy_to_host(pinned, 0, source.address, host_bytes, stream), host_bytes, 1),
            UP: (lambda: card.copy_to_card(source.address, pinned, 0, host_bytes, stream), host_bytes, 1),
            DEVICE: (within, size.copy_bytes, 2),
        }
        for name, (copy, num_bytes, passes) in copies.items():
            if work.out_of_time(SECONDS_A_COPY):
                return
            timing = time_in_turns(card, stream, {name: copy}, 1, SECONDS_A_COPY)[name]
            work.add(
                {
                    "copy": name,
                    "bytes_moved": num_bytes * passes,
                    "gb_per_s": num_bytes * passes / timing.median_s / 1e9,
                    "spread": timing.spread,
                    "rounds": timing.rounds,
                }
            )
        stream.synchronize()
        with card.torch_stream(stream):
            same = torch.equal(*(card.tensor(memory, 0, (size.copy_bytes,), torch.uint8) for memory in taken[:2]))
        for row in work.part.rows:
            row["correct"] = same
    finally:
        stream.synchronize()
        for memory in taken:
            memory.free()


def copy_gb_per_s(work: Work, name: str = DEVICE) -> float | None:
    """What this part measured before, for other parts to compare with."""
    return next((float(row["gb_per_s"]) for row in work.rows_of("copy") if row["copy"] == name), None)
