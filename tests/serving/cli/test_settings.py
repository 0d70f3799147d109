"""Options become configs and limits, and children are given the same."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest

from serving.cli.settings import arguments, config_of, front_arguments, read_limits
from serving.fleet.local_fleet import FleetConfig
from serving.limits import RequestLimits


def given(path: Path | None, *limits: tuple[str, str], proxies: tuple[str, ...] = ()) -> dict[str, object]:
    return {"limits_file": path, "limit": limits, "trusted_proxies": proxies}


def test_without_flags_the_limits_are_the_defaults_and_children_are_told_none() -> None:
    assert read_limits(given(None)) == RequestLimits()
    assert front_arguments(given(None)) == []


@pytest.mark.parametrize("suffix", [".json", ".toml"])
def test_a_flag_overrides_the_file_and_children_are_told_both(tmp_path: Path, suffix: str) -> None:
    values = {"max_candidates": 500, "receive_timeout_s": 2.5}
    text = json.dumps(values) if suffix == ".json" else "".join(f"{name} = {value}\n" for name, value in values.items())
    path = tmp_path / f"limits{suffix}"
    path.write_text(text)
    options = given(path, ("max_candidates", "20"))
    limits = read_limits(options)
    assert (limits.max_candidates, limits.receive_timeout_s) == (20, 2.5)
    told = front_arguments(options)
    assert told == ["--limit", "max_candidates=20", "--limit", "receive_timeout_s=2.5"]
    assert read_limits(given(None, *(tuple(one.split("=")) for one in told[1::2]))) == limits


@pytest.mark.parametrize(
    ("assignment", "problem"),
    [
        (("lunch", "1"), r"lunch: unknown key 'lunch'; allowed are \['max_body_bytes', 'max_json_bytes', "),
        (("max_candidates", "0"), "max_candidates: Input should be greater than or equal to 1"),
        (("max_candidates", "many"), "max_candidates: Input should be a valid integer"),
    ],
)
def test_a_limit_that_is_unknown_or_out_of_range_is_named(assignment: tuple[str, str], problem: str) -> None:
    with pytest.raises(click.UsageError, match=problem):
        read_limits(given(None, assignment))


def test_a_config_takes_the_options_that_are_its_fields_and_names_what_is_out_of_range() -> None:
    options = {"store": Path("models"), "shards": 3, "host": "::1", "registry": None, "threads": 7}
    config = config_of(FleetConfig, options, models=("films",), shards=4)
    assert (config.store, config.shards, config.host, config.registry) == (Path("models"), 4, "::1", None)
    with pytest.raises(click.UsageError, match=r"up: shards: .* less than or equal to 64"):
        config_of(FleetConfig, options | {"shards": 65}, "up: ", models=("films",))


def test_a_child_is_given_each_flag_as_often_as_it_was_given() -> None:
    options = {"models": ("a", "b"), "max_staleness": (("a", "3"),), "hot_gb": 0.5, "advertise": None}
    options["tokens"] = Path("t")
    assert arguments(options, [*options, "not an option of the command"]) == [
        *("--model", "a", "--model", "b", "--max-staleness", "a=3", "--hot-gb", "0.5"),
        *("--tokens", str(Path("t").absolute())),
    ]
