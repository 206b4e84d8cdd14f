"""Several ranks: of tensor parallelism, of pipeline stages, of replicas."""
