"""Prefill/decode disaggregation, beside SGLang's own classes."""
