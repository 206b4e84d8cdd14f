"""What the sources of ours cannot tell: which of our names stand for which of SGLang's classes.

A parameter of the engine that is annotated ``Any`` must be named here, so that whoever takes in
another object of SGLang's says what it is; its attributes are then checked like all others.
"""

_CACHE = "sglang.srt.mem_cache."
_ARGUMENTS = ("sglang.srt.arg_groups.fields",)
_BATCHES = (
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch",
    "sglang.srt.managers.schedule_batch.ScheduleBatch",
)
_OPERATIONS = (
    _CACHE + "hybrid_cache.hybrid_cache_controller.PrefetchOperation",
    "sglang.srt.managers.cache_controller.CacheOperation",
)
_KV_POOL = (
    _CACHE + "memory_pool.MHATokenToKVPool",
    _CACHE + "memory_pool.MLATokenToKVPool",
    _CACHE + "memory_pool.DSATokenToKVPool",
    _CACHE + "memory_pool.HybridLinearKVPool",
    _CACHE + "swa_memory_pool.SWAKVPool",
)
_ATTENTION = ("sglang.srt.layers.radix_attention.RadixAttention",)

OBJECTS: dict[str, tuple[str, ...]] = {
    "ack": ("sglang.srt.managers.cache_controller.HiCacheAck",),
    "args": _ARGUMENTS,
    "batch": _BATCHES,
    "cache": (_CACHE + "unified_radix_cache.UnifiedRadixCache",),
    "controller": (_CACHE + "hybrid_cache.hybrid_cache_controller.HybridCacheController",),
    "decode_req": ("sglang.srt.disaggregation.decode.DecodeRequest",),
    "device_pool": _KV_POOL,
    "forward_batch": _BATCHES,
    "forward_mode": ("sglang.srt.model_executor.forward_batch_info.ForwardMode",),
    "kernel": _ATTENTION,
    "kvcache": _KV_POOL,
    "_kvcache": _KV_POOL,
    "layer_done_counter": ("sglang.srt.managers.cache_controller.LayerDoneCounter",),
    "weight_manager": (
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager",
    ),
    "mem_pool_device": _KV_POOL,
    "memory": ("sglang.srt.arg_groups.fields.memory",),
    "_metrics": ("sglang.srt.observability.metrics_collector.StorageMetrics",),
    "model_config": ("sglang.srt.configs.model_config.ModelConfig",),
    "op": _OPERATIONS,
    "operation": _OPERATIONS,
    "output": ("sglang.srt.model_executor.model_runner.ModelRunnerOutput",),
    "params": (
        _CACHE + "cache_init_params.CacheInitParams",
        _CACHE + "base_prefix_cache.InitLoadBackParams",
    ),
    "queue": ("sglang.srt.disaggregation.decode.DecodeTransferQueue",),
    "req_to_token_pool": (
        _CACHE + "memory_pool.ReqToTokenPool",
        _CACHE + "memory_pool.HybridReqToTokenPool",
    ),
    "req": ("sglang.srt.managers.schedule_batch.Req",),
    "request": ("sglang.srt.managers.schedule_batch.Req",),
    "resolved": _ARGUMENTS,
    "runner": ("sglang.srt.model_executor.model_runner.ModelRunner",),
    "scheduler": ("sglang.srt.managers.scheduler.Scheduler",),
    "server_args": _ARGUMENTS,
    "storage_config": (_CACHE + "hicache_storage.HiCacheStorageConfig",),
    "tree": (_CACHE + "unified_cache.unified_tree_core.UnifiedTreeCore",),
    "token_to_kv_pool_allocator": (
        _CACHE + "allocator.paged.PagedTokenToKVPoolAllocator",
        _CACHE + "allocator.swa.SWATokenToKVPoolAllocator",
    ),
    "transfer": (_CACHE + "hicache_storage.PoolTransfer",),
    "updater": ("sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater",),
}
"""Name of a variable or attribute in rooms that know SGLang -> the classes of which one must have
what is read from it; a package or module stands for all its classes."""

NOT_OBJECTS = {
    "a", "kw", "args", "kwargs", "result", "value", "values", "index", "buffers", "group",
    "_", "kv",
    "components", "hash_values", "host_indices", "device_indices", "token_ids", "host_pool",
    "host_pool_name", "mem_pool_host", "adapter", "model", "own", "stages", "ranks",
    "q", "k", "v", "key_value_num_tokens", "kind", "graphs",
    "kv_pool", "runtime", "pool", "pages", "place", "layout", "plan", "weights", "device",
    "event", "node", "other", "receipt", "retries", "slots", "ids", "extra_key", "cache_salt",
    "allocator", "target_location", "target_locations", "target_sizes",
}  # fmt: skip
"""Other parameters annotated ``Any``: tensors, lists, classes, and pools of many classes."""

OURS = {
    ("ack", "_replace"),  # every NamedTuple's
    ("ack", "reduce"),
    ("request", "prefix_indices"),  # of 0.5.21; later versions ask our tree for it
    ("request", "prefix_len"),
    ("forward_batch", "recompute_pass"),
    ("controller", "eager"),
    ("controller", "node_backups"),
    ("controller", "checks"),
    ("controller", "stages"),
    ("controller", "evict_unloadable"),
    ("controller", "after_forwards"),
    ("controller", "prefix"),
    ("backend", "backups"),
    ("memory", "finish"),
    ("memory", "numpy"),
    ("queue", "extendleft"),  # a deque's
    ("queue", "popleft"),
    ("memory", "parts"),
}
"""What we put there ourselves."""

OVERRIDDEN: dict[str, set[str]] = {
    "OwnPagesController": {
        "_generate_storage_config", "_generic_page_get", "_move_pool_indices", "_page_backup",
        "_page_get_zero_copy", "_page_transfer", "_reduce_prefetch_ack", "attach_storage_backend",
        "detach_storage_backend", "load", "prefetch", "reset", "start_writing", "write",
        "write_storage",
    },
    "OwnPagesPool": {
        "backup_from_device_all_layer", "clear", "free", "get_data_page",
        "get_dummy_flat_data_page", "get_size_per_token", "init_kv_buffer",
        "is_stride_page_aligned", "load_to_device_per_layer", "set_from_flat_data_page",
    },
    "OwnPagesStrategy": {"build", "matches"},
    "HCacheStorage": {
        "batch_exists", "batch_exists_v2", "batch_get", "batch_get_v1", "batch_get_v2",
        "batch_set", "batch_set_v1", "batch_set_v2", "clear", "exists", "get", "get_stats",
        "register_mem_host_pool_v2", "register_mem_pool_host", "set",
    },
}  # fmt: skip
"""What our subclasses take over from SGLang's classes."""

CALLED_BY_SGLANG = {
    "OwnPagesPool": {"get_ksize_per_token", "get_page_buffer_meta", "get_hybrid_pool_buffer"},
    "HCacheStorage": {"close"},
}
"""Methods that no base class has and SGLang calls."""

_CONTROLLER = _CACHE + "hybrid_cache.hybrid_cache_controller.HybridCacheController."
_BASE = "sglang.srt.managers.cache_controller.HiCacheController."
_TREE = _CACHE + "unified_radix_cache.UnifiedRadixCache."
_STORAGE = _CACHE + "hicache_storage.HiCacheStorage."
RESULTS: dict[str, tuple[str, ...]] = {
    _CONTROLLER + "_move_pool_indices": ("tuple[torch.Tensor, torch.Tensor]",),
    _CONTROLLER + "_page_transfer": ("bool",),
    _CONTROLLER + "_storage_hit_query": ("tuple[list[str], int]",),
    _CONTROLLER + "load": ("Optional[torch.Tensor]",),
    _CONTROLLER + "prefetch": ("PrefetchOperation",),
    _CONTROLLER + "write": ("Optional[torch.Tensor]",),
    _CONTROLLER + "write_storage": ("int",),
    _BASE + "_generic_page_get": ("int",),
    _BASE + "_page_get_zero_copy": ("int",),
    _BASE + "_page_transfer_kv_batch": ("int",),
    _TREE + "init_load_back": (
        "Optional[tuple[int, NodeId]]",
        "Optional[tuple[torch.Tensor, NodeId]]",  # 0.5.21
    ),
    _TREE + "prefetch_from_storage": ("Optional[bool]",),
    _STORAGE + "batch_exists": ("int",),
    _STORAGE + "batch_exists_v2": ("PoolTransferResult",),
    _STORAGE + "batch_get_v1": ("List[bool]",),
    _STORAGE + "batch_get_v2": ("dict[str, List[bool]]",),
    _STORAGE + "batch_set_v1": ("List[bool]",),
    _STORAGE + "batch_set_v2": ("dict[str, List[bool]]",),
    "sglang.srt.model_executor.model_runner.ModelRunner.forward": ("ModelRunnerOutput",),
}
"""What is returned, by the annotation, if a hook or override of ours reads it or makes it."""

_REQUEST = "sglang.srt.managers.schedule_batch.Req."
ONE_OF = (
    (_REQUEST + "set_extend_range", _REQUEST + "extend_end"),
    (_REQUEST + "prefix_indices", _REQUEST + "prefix_len"),
)
"""Where versions differ (0.5.21, later ones): of each line one must be there."""
