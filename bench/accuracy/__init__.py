"""What the ways to keep a history's K and V change in what a model says next."""
