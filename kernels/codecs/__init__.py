"""Codecs for stored hidden states."""
