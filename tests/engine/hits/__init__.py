"""What is used of L3, when, and what stays in it."""
