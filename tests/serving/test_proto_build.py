from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_generated_code_is_current(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    command = [sys.executable, str(REPOSITORY / "scripts/build_protos.py"), str(tmp_path)]
    files = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(files) == 8
    stale = [path for path in files if (tmp_path / path).read_text() != (REPOSITORY / path).read_text()]
    assert stale == [], "run scripts/build_protos.py"
