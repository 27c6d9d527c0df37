"""Permutation-invariant MNIST (section 6.6): a 784-1000-1000-10 network, batches of 128 and of 4."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from .base import Claim, Config, Figure, Number, Panel, Sheet, Verdict, option, too_few
from .results import Results, Sample

NORMS = {
    "layer": "LN (hidden layers)",
    "batch": "BN (all layers)",
    "batch_hidden": "BN (hidden layers)",
    "weight": "WN (all layers)",
    "none": "no norm",
}
TARGET = 0.01  # train NLL that "steps to target" waits for
POINTS = 0.3  # percentage points of test error within which LN(4) and LN(128) count as equal
COMPARED = ("layer", "batch", "batch_hidden")
FAR = 2.0  # "far better": at most 1/FAR of the rival's train NLL


@dataclass(frozen=True, kw_only=True)
class MnistConfig(Config):
    """The paper states data, layer sizes, Adam and the unbiased variance; the rest follows common practice."""

    norm: str = option("layer", "normalisation", choices=tuple(NORMS), sweep=True)
    dataset: str = option("mnist", "images", choices=("mnist", "fashion_mnist"))
    hidden: int = option(1000, "units in each hidden layer", least=1)
    unbiased: str = option(
        "small",
        "batch norm divides by n-1: never, always, or for batches under 128",
        choices=("never", "small", "always"),
    )
    momentum: float = option(0.01, "share of the newest batch in batch norm's running statistics", sweep=True, above=0)
    held_out: int = option(5000, "first training cases kept for validation (a tenth at most)", least=0)


def _at_128_as_fast(results: Results) -> Verdict:
    """Updates to the target, LN against both placements of BN."""
    samples = {f"{norm}_at_128": _take(results, norm, 128).steps_to("train_nll", TARGET) for norm in COMPARED}
    ours, *theirs = samples.values()
    shown = f"updates to train NLL {TARGET}: LN {_steps(ours)}; BN on all layers {_steps(theirs[0])}, "
    shown += f"on hidden layers {_steps(theirs[1])}"
    return too_few(**samples) or Verdict(_sooner(ours, *theirs), shown)


def _faster_than_bn_on_all(results: Results) -> Verdict:
    samples = {f"{norm}_at_128": _take(results, norm, 128).steps_to("train_nll", TARGET) for norm in COMPARED[:2]}
    ours, theirs = samples.values()
    shown = f"updates to train NLL {TARGET}: LN {_steps(ours)}, BN on all layers {_steps(theirs)}"
    return too_few(**samples) or Verdict(_sooner(ours, theirs), shown)


def _lower_train_nll(size: int, factor: float) -> Callable[[Results], Verdict]:
    """Judge: LN's final training NLL times ``factor`` is at most that of BN in either placement."""

    def judge(results: Results) -> Verdict:
        samples = {f"{norm}_at_{size}": _take(results, norm, size).last("train_nll") for norm in COMPARED}
        ours, *theirs = samples.values()
        shown = f"final train NLL: LN {ours}; BN on all layers {theirs[0]}, on hidden layers {theirs[1]}"
        return too_few(**samples) or Verdict(all(factor * ours.mean <= s.mean for s in theirs), shown)

    return judge


def _insensitive(results: Results) -> Verdict:
    samples = {f"layer_at_{size}": _take(results, "layer", size).last("test_error") for size in (128, 4)}
    large, small = samples.values()
    gap = 100 * (small.mean - large.mean)
    shown = f"test error: {100 * large.mean:.2f}% at 128, {100 * small.mean:.2f}% at 4, {gap:+.2f} points"
    return too_few(**samples) or Verdict(abs(gap) <= POINTS, shown)


def _batch_norm_degrades(results: Results) -> Verdict:
    samples = {f"batch_at_{size}": _take(results, "batch", size).last("test_error") for size in (128, 4)}
    large, small = samples.values()
    shown = f"test error of BN on all layers: {100 * large.mean:.2f}% at 128, {100 * small.mean:.2f}% at 4"
    return too_few(**samples) or Verdict(small.mean > large.mean, shown)


def _sooner(ours: Sample, *theirs: Sample) -> bool | None:
    """Whether ours got there no later; None when nobody got there."""
    if not any(math.isfinite(s.mean) for s in (ours, *theirs)):
        return None
    return all(ours.mean <= s.mean for s in theirs)


def _take(results: Results, norm: str, size: int) -> Results:
    return results.select(norm=norm, batch_size=size)


def _steps(sample: Sample) -> str:
    return f"{sample.mean:,.0f}" if math.isfinite(sample.mean) else "not reached by every seed"


SAYS = (
    'Section 6.6: LN "exhibits a faster training convergence comparing to batch normalization that is applied to '
    'all layers" (figure only, no number)'
)
RIGHT = "Section 6.6, right panel (figure only, no number)"

CLAIMS = (
    Claim(
        "faster-128",
        "At batch size 128 layer norm reaches a low training loss at least as fast as batch norm on all layers.",
        SAYS,
        _faster_than_bn_on_all,
    ),
    Claim(
        "faster-128-either",
        "The same against batch norm in either placement (all layers, hidden layers only).",
        "Not claimed: the paper ran batch norm on all layers",
        _at_128_as_fast,
    ),
    Claim(
        "lower-128",
        "At batch size 128 layer norm ends with a training NLL no higher than batch norm's.",
        "Section 6.6, left panel (figure only, no number)",
        _lower_train_nll(128, 1.0),
    ),
    Claim(
        "better-4",
        f"At batch size 4 layer norm's training NLL is far below batch norm's (at most 1/{FAR:g}).",
        RIGHT,
        _lower_train_nll(4, FAR),
    ),
    Claim(
        "robust-ln",
        f"Layer norm does not mind the batch size: test error at 4 within {POINTS} points of that at 128.",
        'Section 6.6: "layer normalization is robust to the batch-sizes"',
        _insensitive,
    ),
    Claim(
        "degrades-bn",
        "Batch norm on all layers gets worse when the batch shrinks from 128 to 4.",
        RIGHT,
        _batch_norm_degrades,
    ),
)


def _panel(metric: str, label: str, size: int, log: bool) -> Panel:
    return Panel(f"batch size {size}", metric, label, log=log, where={"batch_size": size})


FIGURES = (
    Figure(
        "mnist",
        "Permutation invariant MNIST, negative log likelihood on the training cases and test error, with layer "
        "normalization and batch normalization; batches of 128 (left) and of 4 (right), as the paper's figure.",
        (
            _panel("train_nll", "train NLL", 128, True),
            _panel("train_nll", "train NLL", 4, True),
            _panel("test_error", "test error", 128, False),
            _panel("test_error", "test error", 4, False),
        ),
    ),
)

SHEET = Sheet(
    name="mnist",
    title="Permutation-invariant MNIST",
    section="6.6",
    about="A fully connected 784-1000-1000-10 classifier. Layer norm sits on the hidden layers, never on the logits; "
    "batch norm is tried on all layers (the paper's) and on the hidden layers.",
    config=MnistConfig,
    module="lamina.experiments.mnist",
    norms=NORMS,
    datasets=("mnist", "fashion_mnist"),
    figures=FIGURES,
    numbers=(
        Number("train_nll", "final train NLL"),
        Number("train_nll", f"updates to train NLL {TARGET}", target=TARGET, digits=0),
        Number("test_error", "final test error, %", scale=100, digits=2),
        Number("test_error", "best test error, %", at="best", scale=100, digits=2),
    ),
    claims=CLAIMS,
    headline="valid_nll",
    vary=("norm", "batch_size"),
    small={"hidden": 256, "epochs": 20.0, "momentum": 0.1, "log_every": 200, "checkpoint_every": 2000},
    small_sweep={"norm": tuple(NORMS), "batch_size": (128, 4)},
    small_seeds=3,
    stackable=True,
)
