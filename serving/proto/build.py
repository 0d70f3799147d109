"""Generates the protobuf modules: `python -m serving.proto.build`, from anywhere."""

from __future__ import annotations

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
OPEN_INFERENCE = Path("serving/proto/inference/open_inference.proto")
PROTOS = (
    Path("serving/proto/shardrank/v1/ranking.proto"),
    OPEN_INFERENCE,
)
# What `serving.proto.inference.pool` is for.
_OWN_POOL = (
    ("from google.protobuf import descriptor_pool as", "from serving.proto.inference import pool as"),
    ("_descriptor_pool.Default()", "_descriptor_pool.POOL"),
)


def build(output: Path) -> list[Path]:
    """Writes the generated modules and their type stubs below `output`, as they lie in the repository.

    Returns:
        The files, relative to `output`.

    Raises:
        RuntimeError: if protoc fails (its own message went to stderr), or generates other code than is known here.
    """
    from grpc_tools import protoc  # type: ignore[import-untyped]

    arguments = [
        "protoc",
        f"--proto_path={REPOSITORY}",
        f"--python_out={output}",
        f"--grpc_python_out={output}",
        f"--mypy_out=quiet:{output}",
        f"--mypy_grpc_out=quiet:{output}",
        *(str(REPOSITORY / path) for path in PROTOS),
    ]
    if protoc.main(arguments) != 0:
        raise RuntimeError("protoc failed")
    for path in PROTOS:
        if not _has_service(REPOSITORY / path):
            for suffix in ("_pb2_grpc.py", "_pb2_grpc.pyi"):
                _generated(output, path, suffix).unlink(missing_ok=True)
    _use_own_pool(_generated(output, OPEN_INFERENCE, "_pb2.py"))
    folders = sorted({path.parent for path in PROTOS})
    found = (path for folder in folders for path in (output / folder).glob("*_pb2*.py*") if path.is_file())
    return sorted(path.relative_to(output) for path in found)


def _generated(output: Path, proto: Path, suffix: str) -> Path:
    return output / proto.parent / proto.name.replace(".proto", suffix)


def _has_service(proto: Path) -> bool:
    return "\nservice " in proto.read_text(encoding="utf-8")


def _use_own_pool(module: Path) -> None:
    code = module.read_text(encoding="utf-8")
    for default, own in _OWN_POOL:
        if code.count(default) != 1:
            raise RuntimeError(f"{module.name} was expected to have {default!r} once")
        code = code.replace(default, own)
    module.write_text(code, encoding="utf-8")


if __name__ == "__main__":
    sys.stdout.writelines(f"{path}\n" for path in build(REPOSITORY))
