"""Permutation-invariant MNIST (section 6.6)."""
