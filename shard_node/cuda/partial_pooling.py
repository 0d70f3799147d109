"""Two ways to pool a bag whose rows lie on several cards, compared by the bytes that cross between cards. Pure.

Peer gather: the card that wants the sum reads every row of its peers. Owner-side partial pooling: every card that owns
some of the bag's rows adds those up and sends one partial sum. A bag of h ids has at most h owners, so short bags are
cheaper to gather; long ones have each card's rows added up before they cross.
"""

from __future__ import annotations

from dataclasses import dataclass

from shard_node.cuda.row_format import RowFormat
from shard_node.planning.card_systems import Link
from shard_node.planning.cost_model import VALUE_BYTES, line_bytes, mean_pieces

MAX_HOTNESS = 1 << 20


@dataclass(frozen=True, slots=True)
class BagShape:
    """A bag as it is spread over cards.

    Attributes:
        row: the format of its rows.
        num_cards: cards, each of which owns as many of the rows that are not hot.
        hot_share: share of its ids whose rows every card has.
        sum_item_bytes: of one element of a partial sum; 4, as sums are added in fp32.
    """

    row: RowFormat
    num_cards: int
    hot_share: float = 0.0
    sum_item_bytes: int = 4


def gathered_bytes(bag: BagShape, hotness: float, link: Link) -> float:
    """Bytes on the link, headers included, that a card takes in to pool a bag of `hotness` ids by peer gather."""
    return hotness * (1 - bag.hot_share) * (1 - 1 / bag.num_cards) * line_bytes(bag.row, link)


def partial_sum_owners(bag: BagShape, hotness: float) -> float:
    """How many other cards own at least one of the bag's ids, in the mean."""
    owner_has_none: float = (1 - (1 - bag.hot_share) / bag.num_cards) ** hotness
    return (bag.num_cards - 1) * (1 - owner_has_none)


def partial_pooled_bytes(bag: BagShape, hotness: float, link: Link) -> float:
    """Bytes on the link, headers included, of the partial sums that come in, and of the ids that go to their owners."""
    sum_bytes = bag.row.embedding_dim * bag.sum_item_bytes
    sum_line = sum_bytes + link.header_bytes * mean_pieces(sum_bytes, sum_bytes, link.packet_bytes)
    ids = hotness * (1 - bag.hot_share) * (1 - 1 / bag.num_cards) * VALUE_BYTES
    return partial_sum_owners(bag, hotness) * sum_line + ids


def partial_pooling_from(bag: BagShape, link: Link) -> int | None:
    """The smallest hotness at which partial sums move fewer bytes than rows; None if there is none up to 2^20.

    The gathered bytes grow in proportion to the hotness, those of partial sums ever more slowly, so there is one
    crossing, and what is cheaper at one hotness beyond it stays so.
    """
    if bag.num_cards == 1 or bag.hot_share >= 1:
        return None
    low, high = 0, MAX_HOTNESS
    if partial_pooled_bytes(bag, high, link) >= gathered_bytes(bag, high, link):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if partial_pooled_bytes(bag, middle, link) < gathered_bytes(bag, middle, link):
            high = middle
        else:
            low = middle
    return high
