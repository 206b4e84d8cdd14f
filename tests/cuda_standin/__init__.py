"""A CUDA device that is not there: its memory is the CPU's, and its streams run late."""
