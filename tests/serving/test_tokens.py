"""Tokens: the file, who may do what, and what happens when the file changes."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import get_args

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from loader.errors import ConfigError
from serving.api.tokens import Scope, TokenEntry, Tokens, new_token, read_tokens
from serving.cli import main
from serving.errors import PermissionDeniedError, UnauthenticatedError


def write(path: Path, *entries: TokenEntry) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps({"tokens": [entry.model_dump() for entry in entries]}))
    beside.replace(path)


@pytest.mark.parametrize(
    ("scope", "allowed"),
    [("rank", {"rank", "describe"}), ("describe", {"describe"}), ("admin", {"rank", "describe", "admin"})],
)
def test_a_scope_reaches_as_far_as_it_says(tmp_path, scope, allowed):
    token, entry = new_token("shop", scope)
    write(tmp_path / "tokens", entry)
    tokens = Tokens(tmp_path / "tokens")
    for wanted in get_args(Scope):
        if wanted in allowed:
            assert tokens.check(f"Bearer {token}", wanted) == "shop"
        else:
            with pytest.raises(PermissionDeniedError, match=f"'shop' has scope '{scope}'; '{wanted}' is needed"):
                tokens.check(f"Bearer {token}", wanted)


@pytest.mark.parametrize(
    "text", [None, "", "Bearer", "Bearer ", "Basic {token}", "{token}", "Bearer {token}x", "Bearer {hash}"]
)
def test_no_token_or_an_unknown_one_is_unauthenticated(tmp_path, text):
    token, entry = new_token("shop", "admin")
    write(tmp_path / "tokens", entry)
    header = None if text is None else text.format(token=token, hash=entry.sha256)
    with pytest.raises(UnauthenticatedError) as caught:
        Tokens(tmp_path / "tokens").check(header, "describe")
    assert (caught.value.http_status, caught.value.grpc_status) == (401, "UNAUTHENTICATED")
    assert caught.value.kind == "unauthenticated"
    assert token not in str(caught.value)


@given(header=st.text(max_size=2000))
def test_whatever_the_header_says_it_is_a_refusal(tmp_path_factory, header):
    path = tmp_path_factory.mktemp("tokens") / "tokens"
    write(path, new_token("shop", "admin")[1])
    with pytest.raises(UnauthenticatedError):
        Tokens(path).check(header, "rank")


def test_the_file_is_read_again_when_it_changes_and_kept_while_it_is_broken(tmp_path, caplog):
    caplog.set_level("INFO", logger="serving")
    path, now = tmp_path / "tokens", [0.0]
    (old, old_entry), (new, new_entry) = new_token("old", "rank"), new_token("new", "rank")
    write(path, old_entry)
    tokens = Tokens(path, clock=lambda: now[0])
    write(path, new_entry)
    assert tokens.check(f"Bearer {old}", "rank") == "old"  # within the second
    now[0] = 1.0
    assert tokens.check(f"Bearer {new}", "rank") == "new"
    with pytest.raises(UnauthenticatedError):
        tokens.check(f"Bearer {old}", "rank")
    path.write_text('{"tokens": [')
    for now[0] in (2.0, 3.0, 4.0):
        assert tokens.check(f"Bearer {new}", "rank") == "new"
    path.unlink()
    for now[0] in (5.0, 6.0):
        assert tokens.check(f"Bearer {new}", "rank") == "new"
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [str(path) in warning for warning in warnings] == [True, True]
    write(path, old_entry)
    now[0] = 7.0
    assert tokens.check(f"Bearer {old}", "rank") == "old"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "document: Invalid JSON"),
        ("[]", "document: Input should be an object"),
        ("{}", "tokens: Field required"),
        ('{"tokens": [], "more": 1}', "more: Extra inputs"),
        ('{"tokens": [{"name": "a", "sha256": "00", "scope": "rank"}]}', "tokens.0.sha256"),
        ('{"tokens": [{"name": "a", "sha256": "%s", "scope": "root"}]}' % ("0" * 64), "tokens.0.scope"),
        ('{"tokens": [{"name": "a b", "sha256": "%s", "scope": "rank"}]}' % ("0" * 64), "tokens.0.name"),
        (
            json.dumps({"tokens": [{"name": n, "sha256": "0" * 64, "scope": "rank"} for n in ("a", "b")]}),
            "two tokens have the same sha256",
        ),
        (
            json.dumps({"tokens": [{"name": "a", "sha256": d * 64, "scope": "rank"} for d in ("0", "1")]}),
            "two tokens have the same name",
        ),
        (" " * (1 << 18) + "{}", "longer than 262144 bytes"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_name_with_what_is_wrong(tmp_path, text, message):
    (tmp_path / "tokens").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        Tokens(tmp_path / "tokens")
    assert str(tmp_path / "tokens") in str(caught.value)


def run(*arguments: str):
    return CliRunner().invoke(main, ["token", "new", *arguments], prog_name="shardrank")


def test_the_command_prints_a_token_once_and_puts_its_hash_into_a_file_for_the_owner_alone(tmp_path):
    path = tmp_path / "tokens.json"
    made = []
    for name, scope in (("shop", "rank"), ("prometheus", "admin")):
        done = run("--name", name, "--scope", scope, "--tokens", str(path))
        assert done.exit_code == 0, done.output
        made.append(done.output.strip())
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert made[0] not in path.read_text()
    assert [(one.name, one.scope, one.sha256) for one in read_tokens(path).tokens] == [
        (name, scope, hashlib.sha256(token.encode()).hexdigest())
        for (name, scope), token in zip((("shop", "rank"), ("prometheus", "admin")), made, strict=True)
    ]
    assert Tokens(path).check(f"Bearer {made[0]}", "rank") == "shop"
    assert os.listdir(tmp_path) == ["tokens.json"]


def test_without_a_file_the_entry_is_printed_too():
    token, entry = run("--name", "shop", "--scope", "rank").output.splitlines()
    assert json.loads(entry)["sha256"] == hashlib.sha256(token.encode()).hexdigest()


def test_a_name_is_given_once_and_a_broken_file_is_left_as_it_is(tmp_path):
    path = tmp_path / "tokens.json"
    assert run("--name", "shop", "--scope", "rank", "--tokens", str(path)).exit_code == 0
    before = path.read_bytes()
    again = run("--name", "shop", "--scope", "admin", "--tokens", str(path))
    assert again.exit_code == 1
    assert "there is a token 'shop' already" in again.output
    assert path.read_bytes() == before
    path.write_text("{")
    assert run("--name", "other", "--scope", "rank", "--tokens", str(path)).exit_code == 1
    assert path.read_text() == "{"
