"""K and V of a layer in pages and in the KV pool."""
