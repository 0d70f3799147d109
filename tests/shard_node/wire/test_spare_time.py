from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shard_node.wire.server import SpareTime


def test_what_was_spent_comes_back_with_the_share_of_the_time_that_passes():
    spare = SpareTime(0.5, 0.004, now=10.0)
    assert spare.is_left(10.0)
    spare.spend(0.010)
    # 4 ms were saved and 10 ms spent: 6 ms are owed, and half of 12 ms pays for them.
    assert not spare.is_left(10.0119)
    assert spare.is_left(10.0121)


def test_a_long_pause_saves_no_more_than_the_bound():
    spare = SpareTime(0.5, 0.004, now=0.0)
    assert spare.is_left(1000.0)
    spare.spend(0.005)
    assert not spare.is_left(1000.0019)
    assert spare.is_left(1000.0021)


def test_none_is_left_of_no_share():
    spare = SpareTime(0.0, 0.001, now=0.0)
    assert spare.is_left(1.0)
    spare.spend(0.002)
    assert not spare.is_left(1e9)


@given(
    share=st.floats(0.1, 0.9),
    pieces=st.lists(st.tuples(st.floats(1e-5, 0.01), st.floats(0, 0.01)), min_size=50, max_size=200),
)
def test_work_takes_no_more_than_its_share_the_bound_and_its_last_piece(share, pieces):
    saved_s, now, spent = 0.005, 0.0, 0.0
    spare = SpareTime(share, saved_s, now)
    for takes_s, pause_s in pieces:
        if spare.is_left(now):
            spare.spend(takes_s)
            spent += takes_s
            now += takes_s
        now += pause_s
    assert spent <= share * now + saved_s + max(takes_s for takes_s, _ in pieces) + 1e-9
