"""Run by every Python process that `make dark` starts, except CPU servers: they have their own."""

import os

if os.environ.get("HCACHE_DARK"):
    import hcache_dark

    hcache_dark.install()
