"""Section 5 of the paper as code: invariances, Fisher information, geometry and sampling noise of normalised models.

    invariance_table, check_invariances            changes of weights and data that leave the output the same
    fisher, blocks, FisherProduct, metric, kl      information, and the distance between neighbouring models
    null_directions, orthogonality, effective_rate, gain_metric, Tracker   effects of the norms on learning
    measured_noise, model_noise, regulariser       noise that batch statistics add

``lamina analyse`` draws all of it; docs/errata.md lists the errors in the paper's text and formulas.
"""

from .closed import closed_jacobian, printed_jacobian
from .families import FAMILIES, Family
from .geometry import null_directions, orthogonality
from .information import METHODS, FisherProduct, blocks, fisher, flat, jacobian, kl, metric, where
from .invariance import invariance_table
from .networks import check_invariances
from .noise import measured_noise, model_noise, regulariser
from .rates import effective_rate, gain_metric
from .training import Tracker, track

__all__ = [
    "FAMILIES",
    "METHODS",
    "Family",
    "FisherProduct",
    "Tracker",
    "blocks",
    "check_invariances",
    "closed_jacobian",
    "effective_rate",
    "fisher",
    "flat",
    "gain_metric",
    "invariance_table",
    "jacobian",
    "kl",
    "measured_noise",
    "metric",
    "model_noise",
    "null_directions",
    "orthogonality",
    "printed_jacobian",
    "regulariser",
    "track",
    "where",
]
