"""Restores: pages become K and V in the device's KV pool. Nothing here imports SGLang."""
