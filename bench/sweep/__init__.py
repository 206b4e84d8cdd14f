"""Restores on a real server over a bus, or from an L3, that is made slower and slower."""
