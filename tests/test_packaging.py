"""The wheel and the source distribution: built, unpacked into a clean environment, and used from there."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def call(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the source distribution, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as content:
        content.extractall(folder, filter="data")
    source = folder / archive.name.removesuffix(".tar.gz")
    call(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=source)
    return folder


def test_the_wheel_holds_every_module_and_kernel_and_nothing_else(built: Path):
    (wheel,) = built.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    packages = ("loader", "shard_node", "router", "serving", "loadtest")
    tracked = call("git", "ls-files", *packages, cwd=ROOT).split() if (ROOT / ".git").exists() else []
    assert held >= {"shardrank/__init__.py", "shardrank/py.typed", "shard_node/cuda/kernels.cu", "serving/py.typed"}
    if tracked:
        assert held - {"shardrank/__init__.py", "shardrank/py.typed"} == set(tracked)


def test_an_installed_wheel_runs_its_command_and_is_typed(built: Path, tmp_path: Path):
    (wheel,) = built.glob("*.whl")
    venv.create(tmp_path / "clean", with_pip=False)
    python = tmp_path / "clean/bin/python"
    (site,) = (tmp_path / "clean/lib").glob("python3*/site-packages")
    call(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    # Its dependencies are those of this environment: they come last, and without its own installation of shardrank.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    code = "import shardrank, serving; shardrank.Ranker; print(shardrank.__file__); print(serving.__file__)"
    files = call(python, "-W", "error", "-c", code, cwd=tmp_path).split()
    assert all(Path(file).is_relative_to(site) for file in files)
    assert "Commands:" in call(tmp_path / "clean/bin/shardrank", "--help", cwd=tmp_path)
    (tmp_path / "user.py").write_text("from shardrank import Client\nreveal_type(Client('grpc://a:1').close())\n")
    told = call(sys.executable, "-m", "mypy", "--python-executable", python, "user.py", cwd=tmp_path)
    assert 'Revealed type is "None"' in told
