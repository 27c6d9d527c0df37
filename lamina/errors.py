"""Errors that state the rule, the received value and the remedy. This module must stay cheap to import."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from numbers import Number
from typing import Any


class InputError(ValueError, RuntimeError):
    """Invalid argument of a call, a constructor or a command.

    It is a ``ValueError``, and also a ``RuntimeError`` because ``torch.nn`` raises that for wrong shapes, so that
    code written for ``torch.nn`` still catches it. The command line exits with code 2.
    """


class BackendError(RuntimeError):
    """Call that the explicitly requested backend does not support."""


class SlowPathWarning(UserWarning):
    """Warning that a missing dependency makes a call several times slower; see ``lamina.notices`` for the texts."""


class RunError(RuntimeError):
    """Failure of a run after its start (loss not finite, disk full); the command line exits with code 1."""


def fail(rule: str, received: object, remedy: str) -> InputError:
    """Return the exception to raise: ``raise fail("eps must be >= 0", "eps=-1", "Pass 1e-5.")``."""
    return InputError(f"{rule}, got {received}. {remedy}")


def not_installed(module: str | None) -> str:
    """Return the error text for a missing optional module, with the command that installs it."""
    name = str(module).partition(".")[0]
    package = {"sklearn": "scikit-learn"}.get(name, name)
    return (
        f"{package} is not installed. Run `pip install {package}`, or `pip install 'lamina-nn[lab]'` for everything "
        "that the experiments and the command line need."
    )


def one_of(what: str, value: object, allowed: Iterable[Any]) -> None:
    """Raise unless ``value`` is in ``allowed``; suggest the closest name."""
    options = list(allowed)
    if any(isinstance(value, type(option)) and value == option for option in options):
        return
    names, received = {str(option): repr(option) for option in options}, show(value).strip("'\"").lower()
    matches = [name for name in names if len(received) > 2 and received in name]
    matches = matches or difflib.get_close_matches(received, names, n=1)
    hint = f"Did you mean {names[matches[0]]}?" if matches else "Pass one of them."
    raise fail(f"{what} must be one of {', '.join(names.values())}", show(value), hint)


def show(value: object) -> str:
    """Return a short repr: arrays and tensors as their shapes, also inside containers; truncate long text."""
    scalar = isinstance(value, (Number, str)) or type(value).__name__ in ("bool", "bool_")  # numpy's is no Number
    if hasattr(value, "shape") and hasattr(value, "dtype") and not scalar:
        dtype = str(value.dtype).removeprefix("torch.")
        return f"shape {list(value.shape)} ({dtype}, {getattr(value, 'device', 'numpy')})"
    if isinstance(value, (tuple, list)):
        inside = ", ".join(show(item) for item in value[:8]) + (", ..." if len(value) > 8 else "")
        text = f"({inside})" if isinstance(value, tuple) else f"[{inside}]"
    elif isinstance(value, dict):
        text = "{" + ", ".join(f"{key!r}: ..." for key in list(value)[:8]) + "}"
    else:
        text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
