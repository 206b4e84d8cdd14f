"""Settings of all tests."""

import os

# Tiny tensors on few cores: threads only wait for each other. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
