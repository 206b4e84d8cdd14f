"""Which layers are stored and restored by which method: cost model, measured profile, solver."""
