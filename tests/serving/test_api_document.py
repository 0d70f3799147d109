from __future__ import annotations

import re
from pathlib import Path

from serving import errors
from serving.limits import RequestLimits
from serving.rank.service import RankingService

API = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text(encoding="utf-8")


def test_every_limit_is_documented():
    assert [name for name in RequestLimits.model_fields if f"`{name}`" not in API] == []


def test_every_kind_of_error_that_a_client_may_see_is_documented_with_its_status():
    # Not answers: bases, what happens before anything is served, and what nobody is left to read.
    unseen = {"bad_request", "internal", "golden_mismatch", "lookup_profile", "canary_share", "listen", "client_gone"}
    unseen |= {"histogram_layout", "tokens_file", "fleet", "child_failed", "bad_model"}
    unseen |= {"untrusted_program", "recording_folder", "recording_damaged"}
    table = [row for row in API.splitlines() if row.startswith("| `")]
    rows = {kind: row for row in table for kind in re.findall(r"`(\w+)`", row.split("|")[1])}
    for error in vars(errors).values():
        if isinstance(error, type) and issubclass(error, errors.ServingError) and error.kind not in unseen:
            assert str(error.http_status) in rows[error.kind], error.kind
            assert error.grpc_status in rows[error.kind], error.kind


def test_every_metric_is_documented():
    text = RankingService().metrics.render().decode()
    names = set(re.findall(r"^# TYPE (shardrank_\w+?)(?:_created)? ", text, re.MULTILINE))
    documented = set(re.findall(r"`(shardrank_\w+)`", API))
    assert [name for name in names if not {name, f"{name}_total"} & documented] == []
