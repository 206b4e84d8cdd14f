"""Are backed-up pages right? The checks in service."""
