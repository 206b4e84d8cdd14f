"""The hooks on SGLang beside the bootstrap hook, by feature; installed only if we are configured.
Each target has one hook, so features share some: its function says what runs in which order."""

from __future__ import annotations

from hcache_backend.metrics import logger
from hcache_backend.sglang import disaggregation, model_runner, radix_cache, storage_threads
from hcache_backend.sglang.hook_registry import install
from hcache_backend.sglang.scheduler import BATCH, COMPUTED, RECEIVED, RELEASE, REQUEST

HIDDEN = [model_runner.ATTENTION, model_runner.FORWARD]
EXCHANGE = [model_runner.FORWARD]  # of latents between ranks
# attention, the slots of a prefix, other uses of the GPU
RECOMPUTE = [model_runner.ATTENTION, radix_cache.LOAD_BACK, RECEIVED]
# HiCache's turn in every turn of the scheduler, and its reports
OWN_PAGES = [radix_cache.TURN, radix_cache.DRAIN]
# L3 is given the uses of pages in L1 and L2, and these with their beginnings, also before the
# memory of the GPU is released; waiting requests keep theirs
USES = [*OWN_PAGES, BATCH, radix_cache.PREFETCH, RECEIVED, storage_threads.BACKUP, RELEASE]
USES += [radix_cache.BACKED_UP, radix_cache.STOPPING, radix_cache.WRITTEN]
HITS = [*OWN_PAGES, BATCH, radix_cache.PREFETCH, RECEIVED, COMPUTED, storage_threads.STOP]
HITS += [storage_threads.LOOK_UP, storage_threads.READ, storage_threads.READ_BATCH]
EVENTS = [radix_cache.EVENTS, storage_threads.BACKUP]  # what L3 stores and evicts
PREFILL_SERVER = [disaggregation.SEND_PREFIX, disaggregation.METADATA]
DECODE_SERVER = [disaggregation.RECEIVED_PROMPT]  # keeps K and V of other weights out of L3
WEIGHTS = [*model_runner.WEIGHTS, model_runner.RESET]  # keep pages of other weights away
ADAPTERS = [REQUEST]  # keeps pages of adapters from requests that only name them
WHOLE_GRAPHS = [model_runner.REPLAY]  # keeps a full prefill graph from K and V that are not there
LATE_WEIGHTS = [model_runner.LATE_WEIGHTS]  # the weights arrive after ``load_model`` has returned


def notice_uses() -> None:
    """Give L3 the used pages; log a warning if it cannot."""
    unseen = "hcache: eviction from L3 does not see uses on the GPU or in host memory: %s"
    if (missing := install(USES)) is not None:
        logger.warning(unseen, missing)
