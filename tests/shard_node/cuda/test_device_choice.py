from __future__ import annotations

import logging
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard_node.cuda.card_set import DeviceChoice, devices_of_cards, open_cards
from shard_node.errors import CardsUnavailableError, DeviceChoiceError

devices = st.lists(st.integers(0, 9999), min_size=1, max_size=8, unique=True).map(tuple)
choices = st.one_of(
    st.sampled_from([DeviceChoice("cpu"), DeviceChoice("auto"), DeviceChoice("cuda")]),
    devices.map(lambda some: DeviceChoice("cuda", some)),
)


@given(choices)
def test_a_choice_of_devices_is_read_back_as_it_is_written(choice):
    assert DeviceChoice.parse(str(choice)) == choice


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("cpu", DeviceChoice("cpu")),
        ("auto", DeviceChoice("auto")),
        ("cuda", DeviceChoice("cuda")),
        ("cuda:3", DeviceChoice("cuda", (3,))),
        ("cuda:1,0", DeviceChoice("cuda", (1, 0))),
    ],
)
def test_devices_are_chosen_by_a_word_or_by_number(text, choice):
    assert DeviceChoice.parse(text) == choice


@pytest.mark.parametrize(
    "text", ["", "gpu", "CPU", "cpu:0", "cuda:", "cuda:-1", "cuda:a", "cuda:0,", "cuda:0 ,1", "cuda:0\n", "cuda:12345"]
)
def test_what_is_no_choice_of_devices_is_refused_with_what_is_allowed(text):
    with pytest.raises(DeviceChoiceError) as error:
        DeviceChoice.parse(text)
    assert str(error.value) == f"device {text!r} is none of 'cpu', 'auto', 'cuda', 'cuda:I' or 'cuda:I,J,...'"


def test_a_device_named_twice_is_refused():
    with pytest.raises(DeviceChoiceError, match="twice"):
        DeviceChoice.parse("cuda:0,1,0")


@given(devices=devices, cards=st.integers(1, 64))
def test_named_devices_take_the_cards_in_turn(devices, cards):
    choice = DeviceChoice("cuda", devices)
    if cards < len(devices):
        with pytest.raises(DeviceChoiceError, match="at most one a card"):
            devices_of_cards(choice, cards, 10_000)
        return
    placed = devices_of_cards(choice, cards, 10_000)
    assert len(placed) == cards
    assert placed[: len(devices)] == devices
    counts = [placed.count(device) for device in devices]
    assert max(counts) - min(counts) <= 1


@given(cards=st.none() | st.integers(1, 64), num_devices=st.integers(1, 100), kind=st.sampled_from(["cuda", "auto"]))
def test_without_names_every_card_has_a_device_of_its_own(cards, num_devices, kind):
    choice = DeviceChoice(kind)
    if cards is not None and cards > num_devices:
        with pytest.raises(DeviceChoiceError, match="'cuda:0'"):
            devices_of_cards(choice, cards, num_devices)
        return
    assert devices_of_cards(choice, cards, num_devices) == tuple(range(cards or min(num_devices, 64)))


def test_a_named_device_holds_as_many_logical_cards_as_are_asked_for():
    assert devices_of_cards(DeviceChoice("cuda", (2,)), 8, 3) == (2,) * 8
    assert devices_of_cards(DeviceChoice("cuda", (2,)), None, 3) == (2,)


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(DeviceChoiceError, match=r"there is no device 3; this process sees 0\.\.2"):
        devices_of_cards(DeviceChoice("cuda", (0, 3)), None, 3)


@pytest.mark.parametrize("cards", [0, 65])
def test_more_cards_than_places_can_name_are_refused(cards):
    with pytest.raises(DeviceChoiceError, match=rf"cards {cards} is not within 1\.\.64"):
        devices_of_cards(DeviceChoice("cuda", (0,)), cards, 1)


def test_the_cpu_needs_no_cards():
    assert open_cards(DeviceChoice("cpu"), 8) is None


@pytest.fixture
def no_cupy(monkeypatch):
    """A process that has no CuPy, also where there is one."""
    monkeypatch.delitem(sys.modules, "shard_node.cuda.cupy_cards", raising=False)
    monkeypatch.setitem(sys.modules, "cupy", None)


def test_cuda_without_cupy_is_refused_with_how_to_install_it(no_cupy):
    with pytest.raises(
        CardsUnavailableError, match=r"device 'cuda': CuPy can't be imported .*pip install 'shardrank\[cuda\]'"
    ):
        open_cards(DeviceChoice("cuda"), 1)


def test_auto_without_cupy_is_the_cpu_and_says_why(no_cupy, caplog):
    caplog.set_level(logging.INFO, logger="shard_node.cuda.card_set")
    assert open_cards(DeviceChoice("auto"), 1) is None
    assert "device 'auto' is the CPU: CuPy can't be imported" in caplog.text
