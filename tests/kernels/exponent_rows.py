"""Exponents of rows, drawn by hypothesis."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from hcache_kernels.codecs.exp4.reference import WINDOW, form_of


@st.composite
def exponent_rows(draw: st.DrawFn, hidden_size: int) -> np.ndarray:
    """Exponents of one row: most in one window, and about as many outside as the codec holds."""
    most = form_of(hidden_size).most
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    base = draw(st.integers(0, 256 - WINDOW))
    width = draw(st.integers(1, WINDOW))
    row = base + rng.integers(0, width, hidden_size)
    row[rng.random(hidden_size) < draw(st.sampled_from([0.0, 0.1, 1.0]))] = 0
    outside = draw(st.sampled_from([0, 1, most - 1, most, most + 1, 2 * most, hidden_size // 2]))
    places = rng.permutation(hidden_size)[: max(0, outside)]
    kind = draw(st.sampled_from(["ones", "infinities", "anywhere", "just above", "just below"]))
    row[places] = {
        "ones": np.ones(len(places), int),
        "infinities": np.full(len(places), 255),
        "anywhere": rng.integers(0, 256, len(places)),
        "just above": np.full(len(places), min(255, base + WINDOW)),
        "just below": np.full(len(places), max(0, base - 1)),
    }[kind]
    return row
