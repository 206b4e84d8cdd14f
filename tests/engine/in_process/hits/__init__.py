"""Pages that L3 has: loads, eager loads and heads, on SGLang's own classes."""
