"""The library as users install it: beside torch alone, with numba, with Triton too; never with the lab's packages."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest

from lamina import notices
from tests.cases import without

ROOT = Path(__file__).parents[2]
requirements = pytest.importorskip("packaging.requirements")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("hatchling", reason="needs the dev extra")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def needed_by(name, found):
    """A distribution and all that it requires, without extras."""
    if name in found:
        return
    found[name] = metadata.distribution(name)
    for text in found[name].requires or ():
        wanted = requirements.Requirement(text)
        if wanted.name != "triton" and (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
            needed_by(wanted.name, found)


def environment(folder, wheel, packages):
    """Interpreter of a virtual environment with the wheel, and with links to the packages that are installed here."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    place = next((folder / "lib").glob("python*")) / "site-packages"
    found = {}
    for package in packages:
        needed_by(package, found)
    for distribution in found.values():
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (place / top).exists():
                (place / top).symlink_to(distribution.locate_file(top))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True)
    return python


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="links files into virtual environments as Linux lays them out")
@pytest.mark.parametrize(
    ("packages", "backend"), [((), "reference"), (("numba",), "numba"), (("numba", "triton"), "numba")], ids=str
)
def test_the_wheel_serves_a_cpu(packages, backend, wheel, tmp_path):
    for package in packages:
        pytest.importorskip(package)
    python = environment(tmp_path / "venv", wheel, ("torch", "numpy", *packages))
    known = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TRITON", "NUMBA"))}
    command = [str(python), "-I", str(Path(__file__).with_name("environment_checks.py")), backend]
    done = subprocess.run(command, capture_output=True, text=True, env=known, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    installed, *warned = done.stdout.split()
    assert Path(installed).is_relative_to(tmp_path)
    assert warned == ([] if "numba" in packages else notices.WARNINGS["numba"].split())  # once


LAB = ("accelerate", "matplotlib", "rich", "safetensors", "scipy", "sklearn", "tensorboard", "typer")


@pytest.mark.parametrize("missing", [("triton",), ("triton", "numba", "llvmlite")], ids=["numba", "torch alone"])
def test_the_library_serves_a_cpu_without(missing):
    """As ``test_the_wheel_serves_a_cpu``, quickly: packages are hidden, and the checks are those of recurrences."""
    if "numba" not in missing:
        pytest.importorskip("numba")
    checks = Path(__file__).with_name("environment_checks.py")
    told = [str(checks), "reference" if "numba" in missing else "numba", "check_layers", "check_cells", "check_streams"]
    run = f"import runpy\nsys.argv = {told}\nrunpy.run_path({told[0]!r}, run_name='__main__')"
    code = without(*missing, *LAB) + run
    known = {k: v for k, v in os.environ.items() if not k.startswith("TRITON")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=known, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1:] == (notices.WARNINGS["numba"].split() if "numba" in missing else [])  # once
