"""The checks in service of backed-up pages."""
