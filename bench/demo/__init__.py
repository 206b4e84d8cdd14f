"""Shows on a real SGLang server what restoring from hidden states saves."""
