"""Recurrences on a CPU: kernels that numba compiles, and what calls them."""
