"""Which keys a canary gets."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import CanaryShareError
from serving.versions.served_versions import CanaryChoice, key_hash

MODELS = st.text(max_size=20)
KEYS = st.text(max_size=40)
SHARES = st.floats(min_value=0.0, max_value=1.0, exclude_min=True, exclude_max=True)


def taken(choice: CanaryChoice, model: str, keys: list[str]) -> set[str]:
    return {key for key in keys if choice.takes(model, key)}


@settings(deadline=None, max_examples=25)
@given(MODELS, st.text(max_size=8), st.floats(min_value=0.01, max_value=0.99))
def test_the_canary_gets_its_share_of_the_keys_within_chance(model, prefix, share):
    num_keys = 4000
    count = len(taken(CanaryChoice.of(2, share), model, [f"{prefix}{number}" for number in range(num_keys)]))
    deviation = math.sqrt(num_keys * share * (1 - share))
    assert abs(count - num_keys * share) < 6 * deviation


@given(MODELS, st.lists(KEYS, max_size=50), SHARES, SHARES)
def test_a_share_that_grows_keeps_the_keys_that_are_in(model, keys, one, other):
    smaller, larger = (CanaryChoice.of(2, share) for share in sorted((one, other)))
    assert taken(smaller, model, keys) <= taken(larger, model, keys)


@given(MODELS, KEYS, SHARES)
def test_the_choice_depends_on_model_key_and_share_alone(model, key, share):
    assert CanaryChoice.of(2, share).takes(model, key) == CanaryChoice.of(3, share).takes(model, key)
    assert CanaryChoice.of(2, share).takes(model, key) == (key_hash(model, key) / 2**64 < share) or (
        # Where the quotient, rounded to a float, meets the share.
        math.isclose(key_hash(model, key) / 2**64, share, rel_tol=1e-12)
    )


def test_the_hash_is_the_same_in_every_process_and_release():
    assert key_hash("films", "user-42") == 12941052709652097497
    assert key_hash("films", "Zürich") == 12032135330414632854


def test_two_models_are_tried_on_different_keys():
    keys = [str(number) for number in range(4000)]
    choice = CanaryChoice.of(2, 0.5)
    both = len(taken(choice, "films", keys) & taken(choice, "books", keys))
    assert abs(both - 1000) < 6 * math.sqrt(4000 * 0.25 * 0.75)


def test_a_key_that_is_not_valid_unicode_has_a_hash_too():
    assert 0 <= key_hash("films", "\ud800") < 2**64


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 1.5, math.nan, math.inf])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(CanaryShareError, match="not above 0 and below 1"):
        CanaryChoice.of(2, share)
