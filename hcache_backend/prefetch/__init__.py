"""Reading a hit from L3: whether it pays, and what is restored and recomputed meanwhile."""
