"""Stand-ins that tests shard: pools, ranks, prefetches and schedulers, each of them once."""
