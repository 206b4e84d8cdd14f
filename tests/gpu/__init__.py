"""Saving and restoring on a CUDA device."""
