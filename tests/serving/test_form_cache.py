from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from serving.form_cache import FormCache


@dataclass
class Known:
    size_bytes: int
    name: str = ""


def test_what_was_added_is_found_and_nothing_else():
    cache = FormCache()
    cache.add("a", Known(5000))
    assert cache.find("a") == Known(5000)
    assert cache.find("b") is None


def test_what_came_first_is_forgotten_when_it_is_full():
    cache = FormCache(max_bytes=20_000)
    for name in "abcdef":
        cache.add(name, Known(5000, name))
        assert cache.size_bytes <= 20_000
    assert [cache.find(name) is not None for name in "abcdef"] == [False, False, True, True, True, True]


def test_what_is_too_large_is_not_kept_and_drives_nothing_out():
    cache = FormCache(max_bytes=20_000)
    assert cache.add("a", Known(5000))
    assert not cache.add("huge", Known(5001))
    assert cache.find("huge") is None
    assert cache.find("a") is not None


def test_what_is_replaced_is_counted_once():
    cache = FormCache(max_bytes=20_000)
    for size in (2000, 3000, 4000):
        cache.add("a", Known(size))
    assert cache.size_bytes == 4000
    assert cache.find("a") == Known(4000)


def test_small_entries_are_bounded_too():
    cache = FormCache(max_bytes=20 * 1024)
    for number in range(100):
        cache.add(number, Known(0))
    assert sum(cache.find(number) is not None for number in range(100)) == 20


def test_threads_that_add_at_once_keep_it_within_its_size():
    cache = FormCache(max_bytes=100_000)

    def add(thread: int) -> None:
        for number in range(300):
            cache.add((thread, number % 40), Known(1500 + number))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(4)))
    kept = [cache.find((thread, number)) for thread in range(4) for number in range(40)]
    assert cache.size_bytes == sum(one.size_bytes for one in kept if one is not None) <= 100_000
