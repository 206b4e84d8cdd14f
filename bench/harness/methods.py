"""Ways to bring a history back, which the programs that measure compare with each other."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench.harness.machine import Machine
from bench.harness.options import ServerOptions, hcache_config

PAGE_SIZE = 64
NIXL = "nixl"
MOONCAKE = "mooncake"
EVERY_HIT = {"min_gain": 0}  # of studies of other options: a hit is read although L3 is slow
# Of the methods that show L3 and restore one after the other.
LAYERWISE: dict[str, Any] = {"restore": "layerwise", **EVERY_HIT}


@dataclass(frozen=True)
class Method:
    """A way to bring histories back.

    Attributes:
        title: For people.
        cache: As in :class:`ServerOptions`.
        storage: SGLang's name of the L3 backend: ``file`` is SGLang's own, ``nixl`` NIXL's for
            local files, ``mooncake`` Mooncake's store in another process, ``dynamic`` ours; None:
            there is none.
        hcache: Options of ours, if ``storage`` is ``dynamic``.
    """

    title: str
    cache: Literal["hicache", "radix", "none"] = "hicache"
    storage: str | None = None
    hcache: Mapping[str, Any] = field(default_factory=dict)


METHODS = {
    "ideal": Method("everything still on the device", "radix"),
    "recompute": Method("recompute", "none"),
    "file": Method("KV, SGLang file L3", storage="file"),
    NIXL: Method("KV, NIXL POSIX L3", storage=NIXL),
    MOONCAKE: Method("KV, Mooncake in memory", storage=MOONCAKE),
    "host": Method("KV, HiCache host memory"),
    "hcache-hidden": Method(
        "HCache, hidden states", storage="dynamic", hcache={"mode": "hidden", **LAYERWISE}
    ),
    "hcache-hidden-eager": Method(
        "HCache, hidden states, eager", storage="dynamic", hcache={"mode": "hidden", **EVERY_HIT}
    ),
    "hcache-kv": Method("HCache, KV pages", storage="dynamic", hcache={"mode": "kv", **LAYERWISE}),
    "hcache": Method("HCache, automatic", storage="dynamic", hcache={"mode": "auto", **LAYERWISE}),
    "hcache-eager": Method("HCache, default options", storage="dynamic"),
}

SERVED = tuple(name for name in METHODS if name not in (NIXL, MOONCAKE))
"""Methods that need nothing but SGLang and their options."""


def server_options(
    method: Method,
    machine: Machine,
    model: Path | str,
    folder: Path,
    *,
    pool_tokens: int,
    hcache: Mapping[str, Any] | None = None,
    **options: Any,
) -> ServerOptions:
    """Options of a server of a method, with its log (``server.log``) and L3 (``l3``) in ``folder``.

    Args:
        model: A folder, or a name that SGLang knows.
        pool_tokens: Of the device's KV pool.
        hcache: More options of ours.
        options: Further fields of :class:`ServerOptions`.
    """
    pages = folder / "l3"
    environment = dict(options.pop("extra_env", {}))
    config: dict[str, Any] | None = None
    if method.storage == "file":
        config = {"prefetch_threshold": PAGE_SIZE}
        environment["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(pages)
    elif method.storage == NIXL:
        posix = {"active": "true", "use_aio": "true"}
        config = {"prefetch_threshold": PAGE_SIZE, "plugin": {"posix": posix}}
        environment["SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR"] = str(pages)
    elif method.storage == "dynamic":
        ours = {**method.hcache, **(hcache or {})}
        config = hcache_config(pages, prefetch_threshold=PAGE_SIZE, **ours)
    if machine.device != "cpu":
        options = {"dtype": None, "attention_backend": None, **options}
    return ServerOptions(
        model=model,
        log=folder / "server.log",
        device=machine.device,
        cache=method.cache,
        page_size=PAGE_SIZE,
        max_total_tokens=pool_tokens,
        storage_backend=method.storage,
        extra_config=config,
        extra_env=environment,
        **options,
    )
