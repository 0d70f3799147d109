import gc

from loader.settled_heap import settle_heap


def test_what_was_there_is_not_gone_over_again_and_what_comes_later_still_is():
    class Node:
        pass

    kept = Node()
    kept.itself = kept
    try:
        settle_heap()
        assert gc.get_freeze_count() > 10_000
        assert not any(found is kept for found in gc.get_objects())
        later = Node()
        later.itself = later
        del later
        assert gc.collect() >= 1
    finally:
        gc.unfreeze()
