"""Evaluation of sentence vectors as in skip-thoughts: ``evaluate(encode)`` takes any callable from strings to array."""

from .evaluation import evaluate as evaluate
