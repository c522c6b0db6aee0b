"""Numba kernels for the CPU."""
