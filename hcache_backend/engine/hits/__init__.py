"""Which L3 hits are read: what a hit costs, what it saves, and prefetches that are ended."""
