"""What is asked of a server: conversations and documents with known statistics.

A workload is first of all lengths (:mod:`.base`): how many tokens each document, question and reply
has, and when it comes. They are drawn from seeded distributions (:mod:`.paper`: those of the HCache
paper). Tokens are drawn from the same seed when they are sent. :mod:`.traces` has requests as
pages, for a store. Neither SGLang nor torch is needed.
"""
