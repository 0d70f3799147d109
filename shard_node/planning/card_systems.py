"""What the cost model needs to know of a machine: bandwidths, packets and latencies, with where they come from.

All rates are of one direction of one card, in 10^9 bytes a second. docs/nvlink.md has the sources with their addresses
and says which numbers are assumptions. None of them was measured by this project; every one is a parameter.
"""

from __future__ import annotations

from pydantic import Field

from loader.snapshot.manifest import Frozen

COPY_SHARE = 0.9
"""Of a card's memory bandwidth, what a device-to-device copy reaches: 3.0 of the H100's 3.35 TB/s."""


class Link(Frozen):
    """A way from one card to memory that is not its own.

    Attributes:
        gb_per_s: line rate of one direction.
        packet_bytes: payload of one packet at most; a read that crosses such a boundary takes another packet.
        header_bytes: what a packet takes on the line beside its payload.
        latency_us: from the request for a row to its arrival, unloaded.
    """

    gb_per_s: float = Field(gt=0)
    packet_bytes: int = Field(default=128, ge=32)
    header_bytes: int = Field(ge=0)
    latency_us: float = Field(ge=0)

    def copied_bytes(self, size_bytes: float) -> float:
        """What a copy of so many bytes in one piece takes on the line."""
        return size_bytes * (1 + self.header_bytes / self.packet_bytes)


class CardSystem(Frozen):
    """One node: cards alike, each linked to every other and to the host.

    Attributes:
        name: as in `SYSTEMS`.
        cards: of the node.
        card_memory_gb: of each card.
        hbm_gb_per_s: what a copy within a card reaches, bytes read and written.
        hbm_latency_us: of a random read, with its address translation.
        peer: to the other cards, all of them together.
        host: to the host's memory.
        host_memory_gb_per_s: of the host's memory, which all cards share.
        launch_us: for the host to launch one kernel.
    """

    name: str
    cards: int = Field(ge=1)
    card_memory_gb: float = Field(gt=0)
    hbm_gb_per_s: float = Field(gt=0)
    hbm_latency_us: float = Field(default=0.7, ge=0)
    peer: Link
    host: Link
    host_memory_gb_per_s: float = Field(gt=0)
    launch_us: float = Field(default=4.0, ge=0)


def _nvlink(gb_per_s: float) -> Link:
    # 25 GB/s of a link carry about 20 GB/s of 128-byte payloads, so each has 32 bytes beside it.
    return Link(gb_per_s=gb_per_s, header_bytes=32, latency_us=1.5)


def _pcie(gb_per_s: float) -> Link:
    # A completion's header of 12 bytes, its framing of 4 and its checksum of 4.
    return Link(gb_per_s=gb_per_s, header_bytes=20, latency_us=2.5)


SYSTEMS: dict[str, CardSystem] = {
    one.name: one
    for one in (
        CardSystem(
            name="a100",
            cards=8,
            card_memory_gb=80,
            hbm_gb_per_s=2039 * COPY_SHARE,
            peer=_nvlink(300),
            host=_pcie(31.5),
            host_memory_gb_per_s=2 * 204.8,
        ),
        CardSystem(
            name="h100",
            cards=8,
            card_memory_gb=80,
            hbm_gb_per_s=3350 * COPY_SHARE,
            peer=_nvlink(450),
            host=_pcie(63),
            host_memory_gb_per_s=2 * 307.2,
        ),
        CardSystem(
            name="h200",
            cards=8,
            card_memory_gb=141,
            hbm_gb_per_s=4800 * COPY_SHARE,
            peer=_nvlink(450),
            host=_pcie(63),
            host_memory_gb_per_s=2 * 307.2,
        ),
        CardSystem(
            name="gb200",
            cards=4,
            card_memory_gb=186,
            hbm_gb_per_s=8000 * COPY_SHARE,
            peer=_nvlink(900),
            host=Link(gb_per_s=450, header_bytes=32, latency_us=1.5),
            host_memory_gb_per_s=2 * 512,
        ),
    )
}
"""By name. `gb200` is a compute tray of an NVL72: two Grace CPUs with two cards each."""
