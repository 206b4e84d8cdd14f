"""Capture: hidden states of each forward pass go to pages in pinned host memory."""
