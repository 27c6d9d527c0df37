"""Recurrences on a CPU: kernels compiled by numba, and the Python code that calls them."""
