"""docs/dense-models.md: its tables are those of the code, and its scripts run as they are printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from serving.models.ranking_models import DenseModelConfig

PAGE = (Path(__file__).resolve().parents[3] / "docs/dense-models.md").read_text(encoding="utf-8")
SECTIONS = {title.strip("`"): text for title, text in (section.split("\n", 1) for section in PAGE.split("\n## ")[1:])}
KINDS = {config.model_fields["kind"].default: config for config in get_args(DenseModelConfig)}
MAX_LINES = 40


def script(section: str) -> str:
    (found,) = re.findall(r"```python\n(.*?)```", SECTIONS[section], re.DOTALL)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_has_every_field_of_a_kind_with_its_default(kind):
    shown = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", SECTIONS[kind].partition("| tensor")[0], re.MULTILINE))
    fields = {name: field for name, field in KINDS[kind].model_fields.items() if name != "kind"}
    assert shown.keys() == fields.keys()
    for name, field in fields.items():
        if field.is_required() or field.default is None:
            assert shown[name] in ("required", "none")
        else:
            assert shown[name].strip("`") == str(
                list(field.default) if isinstance(field.default, tuple) else field.default
            )


@pytest.mark.parametrize(
    "section",
    [pytest.param(one, marks=pytest.mark.nightly) for one in SECTIONS],
)
def test_a_short_script_trains_exports_and_ranks_as_it_is_printed(section, tmp_path):
    assert len(list(filter(None, script(section).splitlines()))) <= MAX_LINES
    subprocess.run([sys.executable, "-c", script(section)], cwd=tmp_path, check=True, timeout=120)
