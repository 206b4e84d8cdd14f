"""Lets an unmodified SGLang serve on a plain CPU. For tests and the demo, never the product.

Put the parent folder on PYTHONPATH (`cpu_engine_env` does) and start `sglang.launch_server`:

- `sitecustomize` installs `shims` (modules that SGLang imports but a CPU wheel set lacks);
- the `hcache_cpu_engine-0.dist-info` folder announces `plugin.activate` to SGLang, which replaces
  the few GPU kernels on the serving path by torch code.

`nursery` is for who starts many servers: one process that has the imports done forks them all.

This module imports nothing heavy: it is loaded at the start of every server process.
"""

from .environment import cache_dir, cpu_engine_env, warm_extensions
from .shims import stub_torchvision

__all__ = ["cache_dir", "cpu_engine_env", "stub_torchvision", "warm_extensions"]
