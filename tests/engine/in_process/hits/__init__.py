"""Pages that L3 has: loads, eager loads and repairs, on SGLang's own classes."""
