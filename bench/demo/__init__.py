"""Holds a conversation on real SGLang servers, and shows what bringing it back from disk saves."""
