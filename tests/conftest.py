"""Settings of all tests."""

import os

# Tiny tensors on few cores: threads only wait for each other. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

# An example that waits for a busy machine is not a slow one; pytest's timeout ends those that hang.
settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")
