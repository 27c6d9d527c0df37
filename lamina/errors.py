"""Errors a user can act on: each states the rule, what was received and the remedy. Nothing heavy is imported here."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class InputError(ValueError, RuntimeError):
    """A call, a constructor or a command got something it cannot use.

    It is a ``ValueError``; it is a ``RuntimeError`` too because ``torch.nn`` raises that for wrong
    shapes, and code written for ``torch.nn`` must go on catching it. The command line ends with code 2.
    """


class BackendError(RuntimeError):
    """A backend that was asked for by name cannot serve this call."""


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
    if any(value is option or value == option for option in options):
        return
    near = difflib.get_close_matches(str(value).lower(), [str(o) for o in options], n=1)
    hint = f"Did you mean {near[0]!r}?" if near else f"Choose one of {', '.join(map(repr, options))}."
    raise fail(f"{what} must be one of {', '.join(map(repr, options))}", repr(value), hint)
