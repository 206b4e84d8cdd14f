"""Kernels against their torch references, interpreted and compiled ahead of time."""
