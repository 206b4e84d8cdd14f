"""Conversations and documents with known statistics, which servers are asked.

Lengths and times (:mod:`.base`) are drawn from seeded distributions (:mod:`.paper`: those of the
HCache paper), and tokens from the same seed. :mod:`.traces` has requests as pages, for a store.
"""
