"""Cost model, machine profile and solver: by which method each layer is stored and restored."""
