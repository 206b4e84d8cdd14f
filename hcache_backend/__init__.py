"""HCache for SGLang: store each layer's hidden states, restore K and V with one GEMM per layer.
``HCacheStorage``, the class that SGLang loads, is imported on first use: most rooms must import
without SGLang."""

from typing import Any

__version__ = "0.1.0"

__all__ = ["HCacheStorage", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "HCacheStorage":
        from hcache_backend.tiers.storage import HCacheStorage

        return HCacheStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
