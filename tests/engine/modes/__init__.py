"""Which mode a server is in, and what it stores of each layer."""
