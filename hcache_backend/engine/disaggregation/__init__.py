"""Prefill/decode disaggregation: K and V go from prefill servers to decode servers."""
