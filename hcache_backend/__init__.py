"""HCache for SGLang: store each layer's hidden states, get K and V back with one GEMM per layer.

SGLang loads the storage class by ``module_path`` ``hcache_backend`` and ``class_name``
``HCacheStorage``, so the name is offered here; it is resolved on first use, because everything
outside :mod:`hcache_backend.engine` must import without SGLang.
"""

from typing import Any

__version__ = "0.1.0"

__all__ = ["HCacheStorage", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "HCacheStorage":
        from hcache_backend.tiers.storage import HCacheStorage

        return HCacheStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
