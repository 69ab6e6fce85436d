"""The wheel, the sdist and an editable install carry both packages; setup.cfg lists all of them."""

from __future__ import annotations

import configparser
import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import setuptools
import torch
from source_tree import FOLDERS, KERNELS, PACKAGE, ROOT

PROGRAM = """
import importlib.metadata, importlib.resources, sys
import tfstyle_dist, tfstyle_dist_kernels.cpu.cpu_compile, tfstyle_dist_kernels.reference
import tfstyle_dist.testing.plugin
assert importlib.resources.files("tfstyle_dist").joinpath("py.typed").is_file(), "py.typed is missing"
scripts = importlib.metadata.distribution("tfstyle_dist").entry_points
assert [(e.name, e.value) for e in scripts if e.group == "console_scripts"] == [
    ("tfstyle-dist", "tfstyle_dist.cli:main")
], scripts
assert [e.value for e in scripts if e.group == "pytest11"] == ["tfstyle_dist.testing.plugin"], scripts
print(tfstyle_dist.__file__)
print(tfstyle_dist_kernels.reference.__file__)
"""
QUICK = (
    "tests/cluster_resolver/test_cluster.py",
    "tests/launch/test_command.py",
    "tests/ops/test_reference.py",
    "tests/runtime/test_deadline.py",
    "tests/strategies/test_everyday.py",
)
HOOK = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def test_setup_cfg_lists_every_package() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = set(config["options"]["packages"].split())
    found = {KERNELS}
    for package, folder in FOLDERS.items():
        for init in folder.rglob("__init__.py"):
            found.add(".".join([package, *init.parent.relative_to(folder).parts]))
    assert listed == found


def test_every_folder_of_the_package_is_a_package() -> None:
    folders = {path.parent for folder in FOLDERS.values() for path in folder.rglob("*.py")} - {FOLDERS[KERNELS]}
    missing = [folder.relative_to(ROOT).as_posix() for folder in folders if not (folder / "__init__.py").is_file()]
    assert not missing, f"add an __init__.py: {missing}"


def run(*command: str | Path, cwd: Path) -> str:
    """Runs ``command`` and returns its output; a failure shows everything it printed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    clean["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=clean, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what packaging needs, so that building leaves nothing in the working tree."""
    target = tmp_path_factory.mktemp("source")
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, target)
    for folder in FOLDERS.values():
        shutil.copytree(folder, target / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    return target


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-c", HOOK, "build_sdist", out, cwd=source)
    (archive,) = out.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from the unpacked sdist, as an installer does it."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (project,) = unpacked.iterdir()
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-c", HOOK, "build_wheel", out, cwd=project)
    (built,) = out.glob("*.whl")
    return built


def make_environment(folder: Path) -> Path:
    """An empty virtual environment that can import torch from the running one; returns its interpreter."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    # Only the folders themselves: .pth files in them, such as those of an editable install, are not followed.
    folders = {Path(module.__file__).parents[1] for module in (setuptools, torch) if module.__file__}
    Path(site, "running.pth").write_text("".join(f"{path}\n" for path in folders), encoding="utf-8")
    return python


def install(python: Path, *what: str | Path) -> None:
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, *what, cwd=python.parent)


@pytest.mark.slow
def test_sdist_holds_both_packages(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.cfg", "pyproject.toml", "tfstyle_dist/py.typed", "kernels/reference.py", "LICENSE"} <= names


@pytest.mark.slow
def test_wheel_holds_every_module(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        f"{package}/{path.relative_to(folder).as_posix()}"
        for package, folder in FOLDERS.items()
        for path in folder.rglob("*.py")
    }
    assert expected | {"tfstyle_dist/py.typed"} <= names
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {PACKAGE, KERNELS}


@pytest.mark.slow
def test_an_sdist_installs_what_is_in_the_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    python = make_environment(tmp_path / "venv")
    install(python, sdist)
    places = run(python, "-c", PROGRAM, cwd=tmp_path).split()
    assert all(Path(place).is_relative_to(tmp_path) for place in places), places
    site = Path(places[0]).parents[1]
    content = zipfile.ZipFile(wheel)
    for name in content.namelist():
        if ".dist-info/" not in name:
            assert (site / name).read_bytes() == content.read(name), name


@pytest.mark.slow
def test_metadata(wheel: Path) -> None:
    """The licence as PEP 639 has it, with its text; no class of a licence beside it, and no address of nobody's."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
        licence = archive.read(name.replace("METADATA", "licenses/LICENSE"))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert licence == (ROOT / "LICENSE").read_bytes()
    assert metadata["Author"] == "The tfstyle_dist authors"
    assert not [c for c in metadata.get_all("Classifier") if c.startswith("License")]
    assert metadata["Home-page"] is None
    assert metadata["Project-URL"] is None
    version = metadata["Version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


@pytest.mark.slow
def test_quick_tests_pass_where_it_is_installed(wheel: Path, tmp_path: Path) -> None:
    """A few tests of every layer, of what was installed and not of this tree; pytest and torch are the running ones."""
    python = make_environment(tmp_path / "venv")
    install(python, wheel)
    assert "launch" in run(python.with_name("tfstyle-dist"), "--help", cwd=tmp_path)
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__", "build"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    where = f"import tfstyle_dist; assert tfstyle_dist.__file__.startswith({str(tmp_path)!r}), tfstyle_dist.__file__"
    run(python, "-c", where, cwd=tmp_path)
    options = ("-q", "-p", "no:cacheprovider", "-n", "0", "-m", "not slow and not gpu and not xla")
    said = run(python, "-m", "pytest", *options, *QUICK, cwd=tmp_path)
    assert " passed" in said, said


@pytest.mark.slow
@pytest.mark.parametrize("from_root", [True, False], ids=["cwd is the project", "cwd is elsewhere"])
def test_editable_install_imports(source: Path, tmp_path: Path, from_root: bool) -> None:
    python = make_environment(tmp_path / "venv")
    install(python, "--editable", source)
    places = run(python, "-c", PROGRAM, cwd=source if from_root else tmp_path).split()
    assert all(Path(place).is_relative_to(source) for place in places), places


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_bench_runs_the_benchmarks() -> None:
    """All but those that need TensorFlow, torchft or a GPU, and nothing that writes into the documentation."""
    said = subprocess.run(["make", "-n", "bench"], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    run = set(re.findall(r"benchmarks/(\w+)\.py", said))
    there = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    others = {"aggregation_gpu", "draw_speed", "elastic_torchft", "elastic_worker"}
    assert there - run == {name for name in there if name.endswith("_tf")} | others
    assert run <= there
    assert "sync_step" in run
