"""Programs for a GPU: kernels, restores, the cost of capture. They need torch and triton only.

    python -m bench.gpu.kernels --help

If the package is not installed, the kernels are taken from the checkout.
"""

import importlib.util
import sys
from pathlib import Path

_KERNELS = Path(__file__).resolve().parents[2] / "kernels"

if importlib.util.find_spec("hcache_kernels") is None:
    _spec = importlib.util.spec_from_file_location(
        "hcache_kernels", _KERNELS / "__init__.py", submodule_search_locations=[str(_KERNELS)]
    )
    assert _spec is not None and _spec.loader is not None
    _module = importlib.util.module_from_spec(_spec)
    sys.modules["hcache_kernels"] = _module
    _spec.loader.exec_module(_module)
