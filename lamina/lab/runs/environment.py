"""Commit, versions and machine of a run."""

from __future__ import annotations

import ast
import contextlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from types import CodeType
from typing import Any

PACKAGE = Path(__file__).parents[2]
COMMIT_VARIABLE = "LAMINA_COMMIT"  # names the commit of a copy that has no .git folder, or an old one


def environment() -> dict[str, Any]:
    """Return versions, commit and machine for a run's header; no host, user or path."""
    from ... import __version__

    named_commit, system = os.environ.get(COMMIT_VARIABLE), f"{platform.system()} {platform.machine()}"
    tracked = None if named_commit else _git("ls-files", "--error-unmatch", "__init__.py")
    commit = _git("rev-parse", "HEAD") if tracked else named_commit
    return {
        "lamina": __version__,
        "commit": commit,
        "dirty": bool(_git("status", "--porcelain", "--", ".")) if tracked else None,
        "versions": _versions(),
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "gpu": _gpu(), "system": system},
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def changed_since(commit: str, files: Sequence[str]) -> bool | None:
    """Return whether the code of ``files`` (pathspecs below the package) changed after ``commit``; None if unknown.

    Comments, docstrings, imports and the names of local variables are not code; a renamed file is compared with itself.
    Unknown means: no repository, or a shallow one without the commit. Only a commit's name reaches git's command line.
    """
    if not re.fullmatch("[0-9a-f]{7,64}", commit) or not _git("ls-files", "--error-unmatch", "__init__.py"):
        return None
    covered = _git("diff", "--relative", "--no-renames", "--name-only", commit, "--", *files)
    entries = _git("diff", "--relative", "--find-renames=40%", "--name-status", commit, "--", ".")
    if covered is None or entries is None:
        return None
    changes = (entry.split("\t")[1:] for entry in entries.splitlines())
    names_covered = {*covered.splitlines()}
    return any(_code_changed(commit, names[0], names[-1]) for names in changes if not names_covered.isdisjoint(names))


def _code_changed(commit: str, old: str, new: str) -> bool:
    """Return whether the code of a file, possibly renamed, differs."""
    path, before = PACKAGE / new, _git("show", f"{commit}:./{old}")
    if before is None or not path.is_file() or path.suffix != ".py":
        return True
    return _code(before) != _code(path.read_text(encoding="utf-8"))


def _code(source: str) -> tuple[Any, ...]:
    """Return the code of a module without docstrings, imports and the names of local variables."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            code = [line for line in body if not isinstance(line, (ast.Import, ast.ImportFrom)) and not _is_text(line)]
            node.body = code or [ast.Pass(lineno=1, col_offset=0)]  # type: ignore[attr-defined]
    return _instructions(compile(tree, "", "exec", dont_inherit=True))


def _instructions(code: CodeType) -> tuple[Any, ...]:
    """Return a code object without its lines and the names of its local variables; arguments keep theirs."""
    arguments = code.co_argcount + code.co_kwonlyargcount
    names = code.co_name, code.co_names, code.co_varnames[:arguments], code.co_flags, len(code.co_freevars)
    constants = [_instructions(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return (*names, *constants, code.co_code, getattr(code, "co_exceptiontable", b""))


def _is_text(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str)


def _git(*arguments: str) -> str | None:
    """Return git's output in the package's folder; None if that is no checkout, or git is not installed."""
    command = ["git", "-C", str(PACKAGE), *arguments]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() if process.returncode == 0 else None


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("torch", "numpy", "numba", "accelerate", "triton"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def _cpu() -> str:
    with contextlib.suppress(OSError):
        if model := re.search(r"^model name.*?:(.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE):
            return model[1].strip()
    return platform.processor() or platform.machine()


def _gpu() -> str | None:
    torch = sys.modules.get("torch")  # imported by any run; importing it here would take seconds
    return str(torch.cuda.get_device_name()) if torch is not None and torch.cuda.is_available() else None
