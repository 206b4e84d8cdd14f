"""K and V of one layer from its hidden states, into the paged pool."""
