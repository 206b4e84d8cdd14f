"""K and V of each layer from its hidden states: how a layer is understood, proven and projected."""
