"""Time to the first token with an L3 of any speed: with ours, without L3, and with others."""
