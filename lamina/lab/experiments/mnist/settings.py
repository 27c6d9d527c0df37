"""Permutation-invariant MNIST (section 6.6): a 784-1000-1000-10 network, batches of 128 and of 4."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...claims import Difference, difference, shown, together, too_few, updates
from ...experiment import Claim, Config, Figure, Number, Panel, Sheet, Verdict, option
from ...results import Results

NORMS = {
    "layer": "LN (hidden layers)",
    "batch": "BN (all layers)",
    "batch_hidden": "BN (hidden layers)",
    "weight": "WN (all layers)",
    "none": "no norm",
}
TARGET = 0.01  # train NLL that "steps to target" waits for
POINTS = 0.3  # percentage points of test error by which LN(4) may exceed LN(128)
COMPARED = {"layer": "LN", "batch": "BN on all layers", "batch_hidden": "BN on hidden layers"}
FAR = 2.0  # "far better": less than 1/FAR of the rival's train NLL


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


def _faster(*rivals: str) -> Callable[[Results], Verdict]:
    """Judge: LN reaches the target in fewer updates than each rival."""

    def judge(results: Results) -> Verdict:
        norms = ("layer", *rivals)
        samples = {f"{norm}_at_128": _take(results, norm, 128).crossing("train_nll", TARGET) for norm in norms}
        ours, *theirs = samples.values()
        saved = [difference(ours, other) for other in theirs]
        reached = updates({COMPARED[norm]: sample for norm, sample in zip(norms, samples.values())})
        told = _told(rivals, [found.text(digits=",.0f", unit="updates") for found in saved])
        text = f"updates to train NLL {TARGET}: {reached}; LN's lead over {told}"
        return too_few(**samples) or together([found.above() for found in saved], text)

    return judge


def _lower_train_nll(size: int, factor: float) -> Callable[[Results], Verdict]:
    """Judge: LN's final training NLL times ``factor`` is below that of BN in either placement."""

    def judge(results: Results) -> Verdict:
        samples = {f"{norm}_at_{size}": _take(results, norm, size).final("train_nll") for norm in COMPARED}
        ours, *theirs = samples.values()
        gaps = [difference(ours, other, factor) for other in theirs]
        ends = ", ".join(f"{name} {shown(sample)}" for name, sample in zip(COMPARED.values(), samples.values()))
        lead = "above LN" if factor == 1 else f"above {factor:g} times LN"
        told = _told(tuple(COMPARED)[1:], [found.text() for found in gaps])
        text = f"final train NLL: {ends}; {lead}: {told}"
        return too_few(**samples) or together([found.above() for found in gaps], text)

    return judge


def _told(norms: tuple[str, ...], texts: list[str]) -> str:
    return "; ".join(f"{COMPARED[norm]} {text}" for norm, text in zip(norms, texts))


def _insensitive(results: Results) -> Verdict:
    return _batch_size_gap(results, "layer", lambda gap: gap.below(POINTS / 100, f"{POINTS} points"))


def _batch_norm_degrades(results: Results) -> Verdict:
    return _batch_size_gap(results, "batch", lambda gap: gap.above())


def _batch_size_gap(results: Results, norm: str, decide: Callable[[Difference], Verdict]) -> Verdict:
    """Verdict on the test error at batch size 4 less that at 128."""
    samples = {f"{norm}_at_{size}": _take(results, norm, size).final("test_error") for size in (128, 4)}
    large, small = samples.values()
    gap = difference(large, small)
    ends = [shown(sample, 100, ".2f") for sample in (large, small)]
    text = f"test error of {COMPARED[norm]}: {ends[0]}% at 128, {ends[1]}% at 4, {gap.text(100, '.2f', 'points')}"
    return too_few(**samples) or together([decide(gap)], text)


def _take(results: Results, norm: str, size: int) -> Results:
    return results.select(norm=norm, batch_size=size)


SAYS = (
    'Section 6.6: LN "exhibits a faster training convergence comparing to batch normalization that is applied to '
    'all layers" (figure only, no number)'
)
RIGHT = "Section 6.6, right panel (figure only, no number)"

CLAIMS = (
    Claim(
        "faster-128",
        "At batch size 128 layer norm reaches a low training loss faster than batch norm on all layers.",
        SAYS,
        _faster("batch"),
    ),
    Claim(
        "faster-128-either",
        "The same against batch norm in either placement (all layers, hidden layers only).",
        "Not claimed: the paper ran batch norm on all layers",
        _faster("batch", "batch_hidden"),
    ),
    Claim(
        "lower-128",
        "At batch size 128 layer norm ends with a lower training NLL than batch norm.",
        "Section 6.6, left panel (figure only, no number)",
        _lower_train_nll(128, 1.0),
    ),
    Claim(
        "better-4",
        f"At batch size 4 layer norm's training NLL is far below batch norm's (less than 1/{FAR:g}).",
        RIGHT,
        _lower_train_nll(4, FAR),
    ),
    Claim(
        "robust-ln",
        f"Layer norm does not mind the batch size: test error at 4 less than {POINTS} points above that at 128.",
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
    about="A fully connected classifier with two hidden layers of {hidden} units. Layer norm sits on the hidden "
    "layers, never on the logits; batch norm is tried on all layers (the paper's) and on the hidden layers.",
    config=MnistConfig,
    module="lamina.lab.experiments.mnist.model",
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
