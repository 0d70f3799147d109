"""A Chromium that is installed on this machine, for tests of pages."""

from __future__ import annotations

import os
import shutil

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
NEEDED = "NEEDS_CHROMIUM"
"""A variable: with 1, a test that finds no Chromium fails instead of being skipped."""


def chromium_path() -> str:
    """Return where it is. Skips the test that asks where there is none, unless it must be there."""
    for name in NAMES:
        if (found := shutil.which(name)) is not None:
            return found
    says = f"no Chromium on PATH: looked for {', '.join(NAMES)}"
    if os.environ.get(NEEDED) == "1":
        raise AssertionError(f"{says}, and {NEEDED} is 1")
    pytest.skip(says)
