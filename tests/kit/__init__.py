"""Stand-ins that tests share: pools, ranks, prefetches and schedulers, each of them once."""
