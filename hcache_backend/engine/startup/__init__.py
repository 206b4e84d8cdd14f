"""Start and attach of a server: checks, plans, setting up."""
