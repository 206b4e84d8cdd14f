"""A second L3, shared by several machines, behind the page store."""
