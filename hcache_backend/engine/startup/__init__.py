"""What runs once, when a server starts or an L3 is attached: checks, plans, and setting up."""
