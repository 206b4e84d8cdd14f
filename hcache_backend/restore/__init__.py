"""Restores: pages in the arena become K and V in the device's KV pool.

``pipeline`` runs copies ahead of projections, ``eager`` begins while L3 is still being read,
``recompute`` runs the first layers instead of reading them. Nothing here imports SGLang.
"""
