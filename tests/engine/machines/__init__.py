"""Prefill and decode servers, machines that share an L3, and replicas behind a router."""
