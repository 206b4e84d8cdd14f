"""Each operation over many shapes, run by the interpreter or on a GPU."""
