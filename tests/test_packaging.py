"""The wheel, the source distribution and the module `shardrank`: built, installed, and what users import from it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

import shardrank

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


USER = """\
from typing import Any
import shardrank
from shardrank import Client, Ranker, RankResult

def rank(client: Client, **body: Any) -> RankResult:
    reveal_type(client.rank("films", {"user_id": 42}, {"film_id": [3, 9]}))
    client.rank("films", top=3)  # type: ignore[call-arg]
    return client.rank("films", **body)

reveal_type(rank(Ranker.open("models/films/3")))
version: str = shardrank.__version__
shardrank.Nonsense  # type: ignore[attr-defined]
"""


def test_the_wheel_holds_every_module_and_kernel_and_nothing_else(built: Path):
    (wheel,) = built.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    packages = ("loader", "shard_node", "router", "serving", "loadtest")
    tracked = call("git", "ls-files", *packages, cwd=ROOT).split() if (ROOT / ".git").exists() else []
    assert held >= {"shardrank/__init__.py", "shardrank/py.typed", "shard_node/cuda/kernels.cu", "serving/py.typed"}
    assert "shard_node/engine/find_keys.c" in held
    if tracked:
        assert held - {"shardrank/__init__.py", "shardrank/py.typed"} == set(tracked)


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel. Its dependencies are those of this environment: they come last, and without `shardrank`."""
    (wheel,) = built.glob("*.whl")
    clean = tmp_path_factory.mktemp("environment") / "clean"
    venv.create(clean, with_pip=False)
    pip = (sys.executable, "-m", "pip", "--python", clean / "bin/python", "install", "--no-deps", "--no-index")
    call(*pip, wheel, cwd=built)
    (site,) = (clean / "lib").glob("python3*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return clean


@pytest.mark.nightly
def test_an_installed_wheel_runs_its_command(installed: Path, tmp_path: Path):
    code = "import shardrank, serving; shardrank.Ranker; print(shardrank.__file__); print(serving.__file__)"
    files = call(installed / "bin/python", "-W", "error", "-c", code, cwd=tmp_path).split()
    assert all(Path(file).is_relative_to(installed / "lib") for file in files)
    assert "Commands:" in call(installed / "bin/shardrank", "--help", cwd=tmp_path)


@pytest.mark.nightly
def test_an_installed_wheel_is_typed(installed: Path, tmp_path: Path):
    (tmp_path / "user.py").write_text(USER)
    # An ignored error that is none is an error.
    mypy = (sys.executable, "-m", "mypy", "--strict", "--warn-unused-ignores")
    typed = call(*mypy, "--python-executable", installed / "bin/python", "user.py", cwd=tmp_path)
    assert typed.count('Revealed type is "serving.results.RankResult"') == 2


PACKAGES = {"loader", "shard_node", "router", "serving", "loadtest"}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "deploy").glob("*.md"))]


def run(code: str, *options: str) -> str:
    return subprocess.run(
        [sys.executable, *options, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout


def test_every_public_name_is_what_the_type_checker_is_told():
    tree = ast.parse(Path(shardrank.__file__).read_text(encoding="utf-8"))
    typed = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [(node.module, alias.name) for node in typed.body for alias in node.names]
    for module, name in imports:
        assert getattr(shardrank, name) is getattr(import_module(module), name)
    assert sorted(name for _, name in imports) == sorted(shardrank.__all__) == sorted(set(dir(shardrank)))


def test_a_name_that_is_not_public_is_refused():
    with pytest.raises(AttributeError, match=r"'shardrank' has no attribute 'Arena'$"):
        _ = shardrank.Arena


NOT_MET = {
    # Of fleets, commands and the wire between processes.
    *("CertificateRoleError", "FittingError", "FleetError", "HotRowsError", "InvalidBagsError", "NodeUnavailableError"),
    *(
        "RecordingDamagedError",
        "RemoteError",
        "RolloutError",
        "RowReadError",
        "TlsConfigError",
        "TlsHandshakeError",
        "TraceError",
    ),
    *("UnfitReplicaError", "WireError", "GenerationNotFoundError"),
    *("PushRefusedError", "TrainingFailedError", "TrainingLogError"),
}


def test_every_error_that_a_caller_can_meet_is_public():
    modules = [import_module(f"{package}.errors") for package in ("loader", "shard_node", "router", "serving")]
    names = {name for module in modules for name, error in vars(module).items() if str(name).endswith("Error")}
    assert names - set(shardrank.__all__) == NOT_MET


@pytest.mark.parametrize("name", ["Client", "AsyncClient", "ShardrankError", "open_registry", "RequestLimits"])
def test_what_a_client_needs_loads_no_torch(name: str):
    assert run(f"import sys, shardrank; shardrank.{name}; print('torch' in sys.modules)") == "False\n"


def test_the_load_generator_and_the_planner_load_no_torch():
    modules = "loadtest.load.generator, router.plan, router.planning.capacity, serving.fleet.supervisor"
    assert run(f"import sys, {modules}; print('torch' in sys.modules)") == "False\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documents_import_from_the_public_module_only(page: Path):
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    imported = [line for block in blocks for line in block.splitlines() if re.match(r"\s*(from|import) ", line)]
    assert [line for line in imported if line.split()[1].partition(".")[0] in PACKAGES] == []
    for line in imported:
        if line.split()[1] == "shardrank":
            exec(line, {})


def test_importing_all_of_it_warns_of_nothing():
    run("import shardrank\nfor name in shardrank.__all__: getattr(shardrank, name)\nimport serving.cli", "-W", "error")


def test_the_page_of_python_names_has_each_of_them():
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    named = {name for name in re.findall(r"`(\w+)`", page) if not name.islower() or "_" in name or name == "export"}
    assert named - {"http_status", "grpc_status"} == set(shardrank.__all__)
