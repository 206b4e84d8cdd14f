"""GPU kernels of hcache-backend, each beside its torch reference."""
