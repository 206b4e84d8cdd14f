"""What runs once, at start or attach: refusals, checks, plans, and the stack."""
