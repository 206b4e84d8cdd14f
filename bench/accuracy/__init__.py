"""The effect of ways to keep a history's K and V on the model's next words."""
