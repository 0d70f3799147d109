from __future__ import annotations

import pytest

from serving.proto.build import REPOSITORY, build


def test_the_generated_code_is_current(tmp_path):
    pytest.importorskip("grpc_tools")
    files = build(tmp_path)
    assert len(files) == 8
    stale = [str(path) for path in files if (tmp_path / path).read_text() != (REPOSITORY / path).read_text()]
    assert stale == [], "run python -m serving.proto.build"
