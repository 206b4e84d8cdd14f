"""Programs that measure; ``python -m bench.NAME`` runs one. They are not installed.

``harness`` starts servers and builds models, for these programs and for the engine tests.
"""
