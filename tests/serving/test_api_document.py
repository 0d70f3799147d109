from __future__ import annotations

import ast
import re
from pathlib import Path

import loader.errors
from loader.errors import ShardrankError
from serving import errors
from serving.limits import RequestLimits
from serving.rank.service import RankingService

ROOT = Path(__file__).resolve().parents[2]
API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def test_every_limit_is_documented():
    assert [name for name in RequestLimits.model_fields if f"`{name}`" not in API] == []


def raised_kinds() -> dict[str, ShardrankError]:
    """Return an error of each kind that is raised where requests are answered, as the calls in the source have it."""
    classes = {name: error for module in (loader.errors, errors) for name, error in vars(module).items()}
    raised: dict[str, ShardrankError] = {}
    folders = ("api", "dashboard", "formats", "rank", "versions")
    for path in (path for folder in folders for path in (ROOT / "serving" / folder).rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else ""
            error = errors.InvalidRequestError if name == "limit_exceeded" else classes.get(name)
            if not name.endswith(("Error", "limit_exceeded")) or error is None:
                continue
            stated = [node for word in call.keywords if word.arg == "kind" for node in ast.walk(word.value)]
            texts = {node.value for node in stated if isinstance(node, ast.Constant)} - {".sparse."}
            for kind in texts or {"limit_exceeded" if name == "limit_exceeded" else error.kind}:
                raised[kind] = error("", "", kind=kind)
    return raised


def test_kinds_of_errors_are_documented_with_their_statuses():
    # Not answers: what happens before anything is served, and what nobody is left to read.
    unseen = {"bad_model", "bad_request", "bad_snapshot", "client_gone", "config", "delta_fork", "golden_mismatch"}
    unseen |= {"rollout"}
    table = [row for row in API.splitlines() if row.startswith("| `")]
    rows = {kind: row for row in table for kind in re.findall(r"`(\w+)`", row.split("|")[1])}
    raised = raised_kinds()
    assert {"invalid_id", "limit_exceeded", "body_too_large", "overloaded"} <= raised.keys()
    for kind in raised.keys() - unseen:
        assert str(raised[kind].http_status) in rows[kind], kind
        assert raised[kind].grpc_status in rows[kind], kind


def test_every_metric_is_documented():
    text = RankingService().metrics.render().decode()
    names = set(re.findall(r"^# TYPE (shardrank_\w+?)(?:_created)? ", text, re.MULTILINE))
    documented = set(re.findall(r"`(shardrank_\w+)`", API))
    assert [name for name in names if not {name, f"{name}_total"} & documented] == []
