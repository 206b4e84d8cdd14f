"""Servers whose pages are encoded: hidden states, K and V, exact and not."""
