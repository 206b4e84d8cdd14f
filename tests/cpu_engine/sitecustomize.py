"""Run by every Python process that has this folder on PYTHONPATH; inert unless it is a CPU server.

The shims of `hcache_cpu_engine.shims` must be in place before anything imports torchvision, triton
or sgl_kernel, and SGLang spawns fresh interpreters, so an import hook set here is the one place
that is early enough in all of them.
"""

import logging
import os

if os.environ.get("HCACHE_DARK"):  # make dark: tests/dark
    import hcache_dark

    hcache_dark.install()

if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    from hcache_cpu_engine import shims

    shims.install()
    # Servers log a summary of their start; tests also read the reasons behind it.
    logging.getLogger("hcache").setLevel(os.environ.get("HCACHE_CPU_LOG_LEVEL", "DEBUG"))
