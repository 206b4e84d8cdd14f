"""Reading a hit from L3: its worth, and restores and recomputation during the read."""
