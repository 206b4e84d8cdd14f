"""What is asked of a server: conversations and documents with known statistics.

A workload is first of all lengths (:mod:`bench.workload.base`): how many tokens each
document, question and reply has, and when it comes. Generators draw them from seeded
distributions (:mod:`.paper` those of the HCache paper, :mod:`.synthetic` others, :mod:`.sharegpt`
a user's file); tokens are drawn from the same seed when they are sent. Neither SGLang nor torch
is needed.
"""
