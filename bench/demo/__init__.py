"""Shows on a real SGLang server the time that restoring from hidden states saves."""
