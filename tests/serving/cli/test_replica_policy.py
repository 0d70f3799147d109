"""`--replica-policy`: checked where it is given, and told to whoever serves."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from serving.cli.fleet import up
from serving.cli.serve import _source, serve


@pytest.mark.parametrize(
    ("text", "told"), [("nosuch=1", "nosuch"), ("failures=0", "failures"), ("budget_share=2", "budget_share")]
)
def test_what_is_unknown_or_out_of_range_is_refused_by_name(tmp_path: Path, text: str, told: str):
    options = serve.make_context("serve", ["--snapshot", str(tmp_path), "--replica-policy", text]).params
    with pytest.raises(click.UsageError, match=rf"replica-policy: .*{told}"):
        _source(options, tmp_path, None)
    context = up.make_context("up", ["--store", str(tmp_path), "--replica-policy", text])
    with context, pytest.raises(click.UsageError, match=rf"replica-policy: .*{told}"):
        up.invoke(context)
