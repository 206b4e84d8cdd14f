"""Which layers by which method: machine profile, cost model, partition, `hcache plan`."""
