"""What a run ran on: versions, commit and machine."""

from __future__ import annotations

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
from typing import Any

COMMIT_VARIABLE = "LAMINA_COMMIT"  # the commit of a copy whose .git is absent or behind, as its maker knows it


def environment() -> dict[str, Any]:
    """Versions, commit and machine, for a run's header; no host, user or path."""
    from . import __version__

    told = os.environ.get(COMMIT_VARIABLE)
    tracked = None if told else _git("ls-files", "--error-unmatch", "__init__.py")
    commit = _git("rev-parse", "HEAD") if tracked else told
    return {
        "lamina": __version__,
        "commit": commit,
        "dirty": bool(_git("status", "--porcelain", "--", ".")) if tracked else None,
        "versions": _versions(),
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "gpu": _gpu(), "system": _system()},
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def changed_since(commit: str, files: Sequence[str]) -> bool | None:
    """Return whether ``files`` (pathspecs below the package) differ from ``commit``'s; None where git cannot tell.

    Git cannot tell without a repository, or in a shallow one that lacks the commit. Anything but a commit's name is
    kept from git's command line.
    """
    if not re.fullmatch("[0-9a-f]{7,64}", commit) or not _git("ls-files", "--error-unmatch", "__init__.py"):
        return None
    changed = _git("diff", "--name-only", commit, "--", *files)
    return None if changed is None else bool(changed)


def _git(*arguments: str) -> str | None:
    """What git says in the package's folder; None where that is no checkout, or git is absent."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("torch", "numpy", "accelerate", "triton"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpu() -> str | None:
    torch = sys.modules.get("torch")  # a run has imported it; nothing here is worth the seconds that takes
    return str(torch.cuda.get_device_name()) if torch is not None and torch.cuda.is_available() else None


def _system() -> str:
    return f"{platform.system()} {platform.machine()}"
