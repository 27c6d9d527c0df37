"""Errors a user can act on: each states the rule, what was received and the remedy. Nothing heavy is imported here."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from numbers import Number
from typing import Any


class InputError(ValueError, RuntimeError):
    """A call, a constructor or a command got something it cannot use.

    It is a ``ValueError``; it is a ``RuntimeError`` too because ``torch.nn`` raises that for wrong
    shapes, and code written for ``torch.nn`` must go on catching it. The command line ends with code 2.
    """


class BackendError(RuntimeError):
    """A backend that was asked for by name cannot serve this call."""


class SlowPathWarning(UserWarning):
    """The environment lacks something that would make a call several times faster; ``lamina.notices`` has the texts."""


class RunError(RuntimeError):
    """A run that began well could not go on (loss not finite, disk full); the command line ends with code 1."""


def fail(rule: str, received: object, remedy: str) -> InputError:
    """The exception to raise: ``raise fail("eps must be >= 0", "eps=-1", "Pass 1e-5.")``."""
    return InputError(f"{rule}, got {received}. {remedy}")


def not_installed(module: str | None) -> str:
    """Say that an optional module is missing, and how to install it alone or with the rest of the lab."""
    name = str(module).partition(".")[0]
    package = {"sklearn": "scikit-learn"}.get(name, name)
    return (
        f"{package} is not installed. Run `pip install {package}`, or `pip install 'lamina-nn[lab]'` for everything "
        "that the experiments and the command line need."
    )


def one_of(what: str, value: object, allowed: Iterable[Any]) -> None:
    """Raise unless ``value`` is among ``allowed``; suggest the nearest name."""
    options = list(allowed)
    if any(isinstance(value, type(option)) and value == option for option in options):
        return
    names, given = {str(option): repr(option) for option in options}, show(value).strip("'\"").lower()
    near = [name for name in names if len(given) > 2 and given in name]
    near = near or difflib.get_close_matches(given, names, n=1)
    hint = f"Did you mean {names[near[0]]}?" if near else "Pass one of them."
    raise fail(f"{what} must be one of {', '.join(names.values())}", show(value), hint)


def show(value: object) -> str:
    """Return a short repr: arrays and tensors by their shape, also inside containers; long texts cut."""
    if hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, (Number, str)):
        kind = str(value.dtype).removeprefix("torch.")
        return f"shape {list(value.shape)} ({kind}, {getattr(value, 'device', 'numpy')})"
    if isinstance(value, (tuple, list)):
        inside = ", ".join(show(item) for item in value[:8]) + (", ..." if len(value) > 8 else "")
        text = f"({inside})" if isinstance(value, tuple) else f"[{inside}]"
    elif isinstance(value, dict):
        text = "{" + ", ".join(f"{key!r}: ..." for key in list(value)[:8]) + "}"
    else:
        text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
