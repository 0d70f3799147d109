"""What README and the guides tell people to type, held against the commands themselves."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest
from safetensors.numpy import load_file

from serving.cli import main
from serving.embedded import Ranker
from serving.training.interactions import generate_interactions
from serving.training.trainer import train_version
from shardrank_testing.command_line import blocks, commands, flags_of

ROOT = Path(__file__).resolve().parents[3]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "deploy/README.md",
    "docs/serving-your-own-model.md",
    "docs/levers.md",
    "docs/nvlink.md",
    "docs/plan.md",
    "docs/tls-and-tokens.md",
    "docs/traces.md",
]
# The part on programs has commands and a script of its own.
GUIDE, _, PROGRAMS = (ROOT / "docs/serving-your-own-model.md").read_text(encoding="utf-8").partition("## A program")


@pytest.mark.parametrize("page", PAGES)
def test_every_command_on_a_page_has_the_flags_that_it_is_given(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    context = click.Context(main)
    for name, rest in re.findall(r"shardrank ([a-z]+(?:-[a-z]+)*)\b([^`|]*)", text):
        if main.get_command(context, name) is None:
            assert name not in main.list_commands(context)
            continue
        line = rest.partition("\n")[0]
        assert set(re.findall(r"--[a-z][a-z-]+", line)) <= flags_of(main, f"{name} {line}")


@pytest.mark.parametrize("page", PAGES)
def test_every_link_on_a_page_leads_to_a_file(page: str) -> None:
    targets = re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text(encoding="utf-8"))
    missing = [one for one in targets if "://" not in one and not (ROOT / page).parent.joinpath(one).exists()]
    assert missing == []


def test_readme_has_the_two_set_up_commands_on_lines_of_their_own() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert "pip install -c constraints.txt . && shardrank demo" in lines
    assert "pip install -c constraints.txt '.[test]' && scripts/test" in lines


def test_readmes_request_is_answered_in_the_form_that_it_shows(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    body = re.search(r"-d '(\{.*?\})'", text, re.DOTALL)
    assert body is not None
    shown = json.loads(blocks(text, "json")[0])
    # As large as the demo's own data, so that the ids exist; hardly trained, as only the form is compared.
    version = train_version(generate_interactions(2000), tmp_path, seed=0, epochs=1)
    with Ranker.open(version.folder) as ranker:
        answer = ranker.rank(json.loads(body[1]))
    assert answer.keys() == shown.keys()
    assert len(answer["scores"]) == len(shown["scores"]) == 3
    assert sorted(shown["order"], key=lambda position: -shown["scores"][position]) == shown["order"]


def test_the_guide_to_your_own_model_works_as_it_is_printed(tmp_path: Path) -> None:
    (tmp_path / "shop.json").write_text(blocks(GUIDE, "json")[0])
    training, in_process = blocks(GUIDE, "python")
    export, verify, up = commands(GUIDE)

    def python(*arguments: str) -> str:
        command = (sys.executable, *arguments)
        return subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout

    python("-c", training)
    python("-m", "serving.cli", *export[1:])
    checked = python("-m", "serving.cli", *verify[1:])
    assert "golden requests: 1 with 2 candidates, every score within 0.01" in checked
    printed = python("-c", in_process)
    curl = re.search(r"^curl -s (\S+) -d '(.*)'$", GUIDE, re.MULTILINE)
    assert curl is not None
    with Ranker.open(tmp_path / "models/shop/1") as ranker:
        scores = ranker.rank(json.loads(curl[2]))["scores"]
    assert str(scores) in printed
    assert up[1:] == ["up", "--store", "models", "--model", "shop", "--shards", "2", "--cards", "2"]
    np.testing.assert_allclose(scores, load_file(tmp_path / "golden.safetensors")["scores"], atol=0.01)
