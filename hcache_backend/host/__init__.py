"""Pages in host memory: K and V from and to the KV pool, and their loads."""
