"""The rooms of the package and which way imports go between them, imports inside functions included."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lamina"
KERNELS_MAY = {"checks", "errors", "notices", "placements", "reference"}
CALL_KERNELS = {"functional", "opaque", "streaming", "cells", "layers", "notices"}  # dispatch, autograd, their callers
ASK_KERNELS = {"options", "recurrent_module"}  # for the names of backends, and for what a request is
BESIDES_TORCH = {"numba", "llvmlite", "triton"}  # behind the kernels' doors


def module_of(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {module_of(path): path for path in PACKAGE.rglob("*.py")}


def package_of(name):
    return name if PATHS[name].name == "__init__.py" else name.rpartition(".")[0]


def imports_of(name):
    """Yield (module, whether at the top) for every import; our own modules as their names below ``lamina``."""
    tree = ast.parse(PATHS[name].read_text(encoding="utf-8"))
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    top = {*tree.body}
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from ((f"!{alias.name}", node in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield f"!{node.module}", node in top
        elif isinstance(node, ast.ImportFrom):
            parts = package_of(name).split(".") if package_of(name) else []
            base = parts[: len(parts) - node.level + 1] + (node.module.split(".") if node.module else [])
            for alias in node.names:
                full = ".".join([*base, alias.name])
                yield (full if full in PATHS else ".".join(base)), node in top


OURS = {name: {found for found, _ in imports_of(name) if not found.startswith("!")} for name in PATHS}


def room(name):
    first = name.partition(".")[0]
    return first if first in ("kernels", "analysis", "lab") else "library"


def loads(name, wanted):
    """Whether importing a module imports a package, through others of ours too."""
    seen, waiting = set(), [name]
    while waiting:
        here = waiting.pop()
        if here in seen:
            continue
        seen.add(here)
        for found, top in imports_of(here):
            if top and found.startswith("!") and found[1:].partition(".")[0] == wanted:
                return True
            if top and not found.startswith("!"):
                waiting += [found, *(p for p in (found.rpartition(".")[0],) if p in PATHS)]
    return False


def test_few_files_at_the_top():
    assert len([*PACKAGE.glob("*.py")]) <= 24


@pytest.mark.parametrize("name", sorted(PATHS))
def test_imports_go_one_way(name):
    allowed = {
        "library": {"library", "kernels"},
        "kernels": {"kernels", "library"},
        "analysis": {"analysis", "library"},
        "lab": {"lab", "library", "analysis"},
    }[room(name)]
    for found in OURS[name] - {""}:
        if name in ("__init__", "", "__main__"):
            continue  # names every room; ``python -m lamina`` opens the command
        assert room(found) in allowed, (name, found)
        if room(name) == "kernels" and room(found) == "library":
            assert found in KERNELS_MAY, (name, found)
        if room(name) == "library" and room(found) == "kernels":
            assert name in CALL_KERNELS | ASK_KERNELS, (name, found)
        if not name.startswith("lab.cli"):
            assert not found.startswith("lab.cli"), (name, found)


@pytest.mark.parametrize("name", sorted(name for name in PATHS if room(name) in ("library", "analysis")))
def test_the_library_needs_torch_and_numpy_only(name):
    outside = {found[1:].partition(".")[0] for found, _ in imports_of(name) if found.startswith("!")}
    shown = {"rich"} if name == "analysis.texts" else set()  # a table for the terminal, for who asks for one
    assert outside <= {*sys.stdlib_module_names, "torch", "numpy", "lamina"} | BESIDES_TORCH | shown, outside


LIGHT = sorted(
    name
    for name in PATHS
    if name.startswith(("lab.reports", "lab.cli", "lab.data")) or name.endswith((".settings", "lab.experiments"))
)


@pytest.mark.parametrize("name", LIGHT)
def test_help_and_reports_open_without_torch(name):
    assert name in ("lab.cli.bench", "lab.reports.analysis") or not loads(name, "torch")


def as_one_room(name):
    return "kernels" if room(name) == "kernels" else name


def test_no_cycles():
    """Between modules, the kernels' room counting as one."""
    graph, done, path = {}, set(), []
    for name, found in OURS.items():
        graph.setdefault(as_one_room(name), set()).update(map(as_one_room, found))

    def visit(name):
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            path.append(name)
            for found in sorted(graph[name] - {"", name}):
                visit(found)
            done.add(path.pop())

    for name in sorted(graph):
        visit(name)
