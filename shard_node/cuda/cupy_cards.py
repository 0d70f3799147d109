"""Real cards: whole devices, or several logical cards on one."""

from __future__ import annotations

import ctypes
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final

import torch

from shard_node.cuda.cards import Card, Graph, Memory, PinnedMemory, Stream
from shard_node.cuda.cupy_api import (
    PEER_ACCESS_ALREADY_ENABLED,
    driver,
    runtime,
    usable_devices,
    view,
)
from shard_node.cuda.cupy_device import CupyDevice, CupyMemory, CupyPinnedMemory, address_within, cuda_status
from shard_node.cuda.cupy_streams import LANE_PRIORITY, LOW_PRIORITY, CupyStream, capture, made_here
from shard_node.cuda.kernel_arguments import pointers_to
from shard_node.cuda.kernel_params import MAX_CARDS, THREADS_PER_BLOCK
from shard_node.errors import CardError, CardsUnavailableError, DeviceChoiceError

__all__ = ["CupyCard", "CupyCards", "open_cupy_cards", "usable_devices"]

logger = logging.getLogger(__name__)

OLDEST_CAPABILITY: Final = (8, 0)
"""Compute capability: the kernels convert to bf16 by an instruction that came with it."""


def open_cupy_cards(devices: Sequence[int], num_cards: int | None = None) -> CupyCards:
    """Opens cards: contexts, kernels, peer access.

    Args:
        devices: take the cards in turn: card i lies on `devices[i % len(devices)]`.
        num_cards: 1..64; None for one on each of `devices`.

    Raises:
        CardsUnavailableError: this process can't use a GPU, or one is too old.
        DeviceChoiceError: there is no such device, or as many cards can't be.
        CardError: CUDA failed, or the kernels do not compile.
    """
    available = usable_devices()
    cards = len(devices) if num_cards is None else num_cards
    if not devices or not 1 <= cards <= MAX_CARDS:
        raise DeviceChoiceError(f"{cards} cards on {len(devices)} devices: 1..{MAX_CARDS} cards on at least one")
    placed = [devices[card % len(devices)] for card in range(cards)]
    for device in placed:
        if not 0 <= device < available:
            raise DeviceChoiceError(f"there is no device {device}; this process sees 0..{available - 1}")
        if (capability := torch.cuda.get_device_capability(device)) < OLDEST_CAPABILITY:
            raise CardsUnavailableError(
                f"device {device} ({torch.cuda.get_device_name(device)}) has compute capability "
                f"{'.'.join(map(str, capability))}; the kernels need {'.'.join(map(str, OLDEST_CAPABILITY))} or newer"
            )
    opened = {index: CupyDevice(index) for index in dict.fromkeys(placed)}
    return CupyCards([CupyCard(number, opened[index]) for number, index in enumerate(placed)])


class CupyCards:
    """The cards of a process. Made by `open_cupy_cards`."""

    def __init__(self, cards: Sequence[CupyCard]) -> None:
        self._cards = tuple(cards)
        devices = list(dict.fromkeys(card.device for card in cards))
        self._peer_access = enable_peer_access(devices)
        kinds = Counter(torch.cuda.get_device_name(device.index) for device in devices)
        named = " + ".join(f"{count} x {kind}" for kind, count in kinds.items())
        self._name = named if len(devices) == len(cards) else f"{len(cards)} logical cards on {named}"

    @property
    def cards(self) -> tuple[Card, ...]:
        """By number."""
        return self._cards

    @property
    def peer_access(self) -> bool:
        """Whether every card reads every other's memory; always so on one device."""
        return self._peer_access

    @property
    def name(self) -> str:
        """`8 x NVIDIA H100 80GB HBM3`, `8 logical cards on 1 x NVIDIA H100 80GB HBM3`."""
        return self._name

    def allocate_pinned(self, size_bytes: int) -> CupyPinnedMemory:
        """Raises MemoryBudgetError if the host can't lock as much."""
        return self._cards[0].device.allocate_pinned(size_bytes)


def enable_peer_access(devices: Sequence[CupyDevice]) -> bool:
    """Lets all devices read each other's memory, as far as that can be; whether all do. What fails is logged."""
    complete = True
    for reader in devices:
        for owner in devices:
            if reader is owner:
                continue
            try:
                with reader.current(f"access to the memory of device {owner.index}"):
                    if not runtime.deviceCanAccessPeer(reader.index, owner.index):
                        raise CardError(f"device {reader.index} has no way to the memory of device {owner.index}")
                    runtime.deviceEnablePeerAccess(owner.index)
            except CardError as error:
                if cuda_status(error) != PEER_ACCESS_ALREADY_ENABLED:
                    logger.warning("%s", error)
                    complete = False
    return complete


class CupyCard:
    """One card: a device, or a part of one. Thread-safe."""

    def __init__(self, number: int, device: CupyDevice) -> None:
        self._number = number
        self.device = device

    @property
    def number(self) -> int:
        """Its place among the cards, from 0."""
        return self._number

    @property
    def torch_device(self) -> torch.device:
        """`cuda:I`."""
        return self.device.torch_device

    @property
    def device_index(self) -> int:
        """I of `cuda:I`."""
        return self.device.index

    @property
    def total_bytes(self) -> int:
        """Memory of the device."""
        return self.device.total_bytes

    def free_bytes(self) -> int:
        """Memory that can still be allocated. What torch's allocator keeps for later counts as used."""
        return self.device.free_bytes()

    def give_back_unused(self) -> None:
        """Has torch's allocator let go of what it keeps for later. Waits for the device."""
        self.device.give_back_unused()

    def allocate(self, size_bytes: int) -> CupyMemory:
        """Raises MemoryBudgetError, with the numbers, if the device has not as much."""
        return self.device.allocate(size_bytes)

    def stream(self, *, low_priority: bool = False) -> CupyStream:
        """A new one, which does not wait for the default stream; `low_priority` gives way to all that are not."""
        return CupyStream(self.device, LOW_PRIORITY if low_priority else LANE_PRIORITY)

    def launch(self, kernel: str, grid: tuple[int, int], params: Sequence[ctypes.Structure], stream: Stream) -> None:
        """Launches `grid` blocks of THREADS_PER_BLOCK threads. The structures are copied at once."""
        # The parameters themselves are copied by the driver before it returns.
        pointers = pointers_to(params)
        address = ctypes.addressof(pointers)
        function = self.device.kernels[kernel]
        with self.device.current(f"launching {kernel} with {grid[0]} x {grid[1]} blocks"):
            driver.launchKernel(function, grid[0], grid[1], 1, THREADS_PER_BLOCK, 1, 1, 0, stream.pointer, address, 0)

    def copy_to_card(self, target: int, source: PinnedMemory, first: int, size_bytes: int, stream: Stream) -> None:
        """Copies source.array[first : first + size_bytes] to the address `target`."""
        self._copy(target, address_within(source, first, size_bytes), size_bytes, stream)

    def copy_to_host(self, target: PinnedMemory, first: int, source: int, size_bytes: int, stream: Stream) -> None:
        """Copies from the address `source` to target.array[first : first + size_bytes]."""
        self._copy(address_within(target, first, size_bytes), source, size_bytes, stream)

    def _copy(self, target: int, source: int, size_bytes: int, stream: Stream) -> None:
        if size_bytes:
            with self.device.current(f"copying {size_bytes} bytes"):
                # Default: the addresses say by themselves on which side they are.
                runtime.memcpyAsync(target, source, size_bytes, runtime.memcpyDefault, stream.pointer)

    def zero(self, target: int, size_bytes: int, stream: Stream) -> None:
        """Fills bytes from the address `target` on with zeros."""
        if size_bytes:
            with self.device.current(f"zeroing {size_bytes} bytes"):
                runtime.memsetAsync(target, 0, size_bytes, stream.pointer)

    def tensor(self, memory: Memory, first: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous view of memory from byte `first` on, a multiple of the dtype's size."""
        size_bytes = math.prod(shape) * dtype.itemsize
        address = address_within(memory, first, size_bytes)
        if address % dtype.itemsize:
            raise CardError(f"byte {first} of memory is not where a {dtype} can lie")
        if not size_bytes:
            return torch.empty(shape, dtype=dtype, device=self.torch_device)
        with self.device.current("viewing memory"):
            return view(address, size_bytes, memory, self.device.index).view(dtype).view(shape)

    def torch_stream(self, stream: Stream) -> AbstractContextManager[object]:
        """Within it, this thread's torch operations go to the stream."""
        return torch.cuda.stream(made_here(stream, CupyStream).for_torch)

    def capture(self, stream: Stream, work: Callable[[], None]) -> Graph:
        """Records what `work` puts on the stream. Raises CardError if it did what can't be captured."""
        return capture(made_here(stream, CupyStream), work)
