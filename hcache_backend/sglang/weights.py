"""The loaded weights: fingerprint, namespaces of their pages, and whether L3 may serve."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from hcache_backend import metrics
from hcache_backend.fingerprint import (
    TensorDigest,
    Weights,
    any_ranks_fingerprint,
    combine_stages,
    digest_tensors,
    fingerprint,
    model_tensors,
    namespace,
)
from hcache_backend.format.page import FORMAT_VERSION
from hcache_backend.host.stages import PipelineStages
from hcache_backend.metrics import logger
from hcache_backend.sglang.arguments import page_size
from hcache_backend.sglang.groups import new_stage_group

_PENDING = "the weights were updated and not all pipeline stages have sent theirs"
_INDEX_KEYS = (
    "SGLANG_DISABLE_DSA_INDEXER_FUSION",
    "SGLANG_DISABLE_AITER_FUSED_FP8_DSA_INDEXER",
    "SGLANG_DSA_HIP_DISABLE_PRESHUFFLE",
    "SGLANG_USE_AITER",
    "AITER_ENABLE_AOT_GLUON_PA_MQA_LOGITS",
)
"""Variables that decide if SGLang turns index keys by a Hadamard matrix, and their layout."""
_REASONS = ("quarantined", "not_restorable", "flush_needed", "stages")


class LoadedWeights:
    """Weights of the model of SGLang's ``runner``, and of its draft model. Any thread may ask.
    ``present``: None until they are read."""

    def __init__(self, runner: Any, present: Weights | None = None) -> None:
        self.runner, self.present = runner, present
        self.draft: object = None  # SGLang's ModelRunner of a draft model
        # Digest (hexadecimal) of its layers on this rank, in the names of its pages in L3; its
        # embedding and head may be the model's.
        self.draft_digest: str | None = None
        self.page_fields: dict[str, object] = {}  # of own pages' namespace
        # Called on the scheduler thread when captured rows lose their meaning, ...
        self.on_weights_changed: list[Callable[[], None]] = []
        # ...when L1 and L2 have been emptied, ...
        self.on_caches_flushed: list[Callable[[], None]] = []
        # ...and, in a thread of its own, when projected K and V stop matching those of the model.
        self.on_quarantine: list[Callable[[], None]] = []
        # why L3 is suspended, by the metric's label; the first reason in _REASONS counts
        self._reasons: dict[str, str | None] = dict.fromkeys(_REASONS)
        self._namespaces: dict[tuple[bytes, str], bytes] = {}
        self._stages: PipelineStages[Weights | None] | None = None
        self._lock = threading.RLock()
        self._stand_in: Weights | None = None
        self._updates_pending = 0  # that have ended, and whose weights are being gathered
        self._update_is_open = False

    def namespace_of(self, weights: Weights, **shape: object) -> bytes:
        """Namespace (16 bytes) of pages that ``weights`` made and that look like ``shape``. With
        ``any_ranks`` in it, servers with other numbers of ranks share the namespace."""
        digest = weights.any_ranks if shape.get("any_ranks") else weights.fingerprint
        # Asked for by every batch of pages; building it walks the model's whole configuration.
        key = (digest, repr(sorted(shape.items())))
        if key not in self._namespaces:
            settings = _settings(self.runner.model_config.hf_config.to_dict())
            made_by = {
                "format": FORMAT_VERSION,
                "weights": digest.hex(),
                "model": settings,
                "dtype": str(self.runner.dtype),
                "kv_dtype": str(self.runner.kv_cache_dtype),
                "page_size": page_size(self.runner.server_args),
                **_index_keys(settings, self.runner),
            }
            self._namespaces[key] = namespace({**made_by, **shape})
        return self._namespaces[key]

    def page_namespace(self, weights: Weights | None = None) -> bytes:
        """Namespace (16 bytes) of our own pages, by default those of the present weights."""
        weights = weights or self.present
        assert weights is not None
        return self.namespace_of(weights, **self.page_fields)

    def page_namespaces(self) -> tuple[bytes, ...]:
        """Namespaces of pages of the present weights; a stand-in until all stages sent theirs."""
        made = filter(None, (self.present, self._stand_in))
        return tuple(map(self.page_namespace, made))

    def read_model(self) -> None:
        """Fingerprint the loaded weights. Every rank of every stage must call it at one point.
        Raises RuntimeError on all ranks if one could not read its weights."""
        self._use_weights(self._gather_weights())
        self._suspend()

    def read_draft(self, runner: Any) -> None:
        """Fingerprint the weights of a draft model: pages of another one give other drafts."""
        self.draft, self.draft_digest = runner, os.urandom(16).hex()  # if it cannot be read
        with metrics.catching("draft", "pages of the draft model are not found again"):
            shared, named = ("embed_tokens", "lm_head"), model_tensors(runner.model)
            own = ((name, t) for name, t in named if not any(part in name for part in shared))
            self.draft_digest = fingerprint([digest_tensors(own)]).hex()
        if "draft" in self.page_fields:  # its K and V are in our own pages
            self.page_fields["draft"] = self.draft_digest

    def begin_update(self) -> None:
        """Weights are about to change: rows captured or queued under the old ones are void."""
        if self.present is not None and self.present.suspended is None:
            flushed = "until the caches are flushed (POST /flush_cache)"
            logger.warning("hcache: weights are changing: L3 is off %s", flushed)
        self._suspend(flush_needed="the weights were updated and the caches not flushed yet")
        for callback in self.on_weights_changed:
            callback()

    def forget_weights(self) -> None:
        """A part of the weights has changed, and others will. L3 is suspended until
        :meth:`end_update`, which alone reads the weights: an update may have 100 parts."""
        with self._lock:
            self._update_is_open = True
            self._suspend(stages=_PENDING)
            if self.present is not None:  # whatever they are, they are not the old ones
                unknown = os.urandom(16)
                self._stand_in = Weights(unknown, self.present.suspended, unknown)
                self.present = self._stand_in

    def end_update(self) -> None:
        """All weights have changed. L3 is suspended until a flush, and until all stages have sent
        theirs. The ranks read theirs together."""
        with self._lock:
            self.forget_weights()
            self._update_is_open = False
            self._updates_pending += 1
        if self.draft is not None:
            self.read_draft(self.draft)
        self._gather_weights().add_done_callback(self._weights_gathered)

    def caches_were_flushed(self) -> None:
        """L1, L2 and the queues have nothing of the old weights: L3 may serve again."""
        for callback in self.on_caches_flushed:
            callback()
        self._suspend(flush_needed=None)

    def got_other_weights(self) -> None:
        """A prefill server sent K and V of other weights: L3 is suspended until a flush."""
        sent = "a prefill server sent K and V of other"
        with self._lock:
            if self._reasons["flush_needed"] is not None:
                return
            self._suspend(flush_needed=f"{sent} weights")
        logger.warning("hcache: %s or unknown weights: L3 is off until POST /flush_cache", sent)

    def begin_quarantine(self, reason: str) -> None:
        """Projected K and V differ from the model's: stop saving and serving, for good."""
        with self._lock:
            if self.quarantine is not None:
                return
            self._suspend(quarantined=reason)
        logger.error(
            f"hcache: {reason}. L3 is off until a restart, and the pages that this server wrote "
            "are being deleted. Requests continue. Please report this with the log"
        )
        for callback in self.on_quarantine:
            threading.Thread(target=callback, name="hcache-quarantine", daemon=True).start()

    def cannot_restore(self, reason: str) -> None:
        """Pages are right but of no use here: L3 neither takes nor gives until a restart."""
        self._suspend(not_restorable=reason)

    @property
    def quarantine(self) -> str | None:
        return self._reasons["quarantined"]

    def _suspend(self, **reasons: str | None) -> None:
        """Set reasons against L3 (None: no more); it is suspended by the first that is known."""
        with self._lock:
            self._reasons |= reasons
            known = [(code, why) for code, why in self._reasons.items() if why is not None]
            reason = known[0][1] if known else None
            if self.present is not None and self.present.suspended != reason:
                self.present = replace(self.present, suspended=reason)
                if reason is None:
                    logger.info("hcache: L3 serves again, in the namespace of the new weights")
            metrics.SUSPENDED.only(*(code for code, _ in known[:1]))

    def _gather_weights(self) -> Future[list[Weights | None]]:
        """Tell the weights of this pipeline stage to all stages; returns those of all stages."""
        if self._stages is None:
            self._stages = PipelineStages(new_stage_group())
        return self._stages.gather(_stage_weights(self.runner.model))

    def _use_weights(self, gathered: Future[list[Weights | None]]) -> None:
        """Combine all stages' weights; raises RuntimeError if a stage could not read its own."""
        of_stages = gathered.result()
        stages = [weights for weights in of_stages if weights is not None]
        if len(stages) < len(of_stages):
            raise RuntimeError("hcache: the weights could not be read")
        with self._lock:
            self.present = Weights(
                combine_stages([stage.fingerprint for stage in stages]),
                self.present.suspended if self.present else None,
                combine_stages([stage.any_ranks for stage in stages]),
            )

    def _weights_gathered(self, gathered: Future[list[Weights | None]]) -> None:
        """All stages have sent weights: use them, unless others will follow. Any thread."""
        with self._lock:
            self._updates_pending -= 1
            if self._updates_pending or self._update_is_open:
                return  # the weights have changed again
            try:
                self._use_weights(gathered)
            except Exception as error:  # under the old fingerprint L3 must not serve again
                self.begin_quarantine(str(error))
            self._suspend(stages=None)


def _stage_weights(model: Any) -> Weights | None:
    """The weights of this pipeline stage, or None if one of its ranks could not read its own."""
    from sglang.srt.distributed import get_tp_group

    digests: list[TensorDigest] | None = None
    try:
        digests = _digest_model(model)
    except Exception:
        logger.exception("hcache: the weights could not be read")
    ranks = get_tp_group().all_gather_object(digests)
    if None in ranks:
        return None
    return Weights(fingerprint(ranks), any_ranks=any_ranks_fingerprint(ranks))


def _digest_model(model: Any) -> list[TensorDigest]:
    """Digests of all tensors; row-parallel weights are named, as ranks divide them by columns."""
    from sglang.srt.layers.linear import RowParallelLinear

    def named(name: str) -> str:
        """LoRA wraps layers when it is set up, which must not make other weights of them."""
        return name.replace(".base_layer.", ".")

    modules, parameters = model.named_modules(), model.named_parameters()
    rows = (f"{name}.weight" for name, of in modules if isinstance(of, RowParallelLinear))
    # The same of all experts of a layer in one tensor.
    experts = (name for name, _ in parameters if name.endswith("w2_weight"))
    tensors = ((named(name), tensor) for name, tensor in model_tensors(model))
    return digest_tensors(tensors, set(map(named, (*rows, *experts))))


def _settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The model's settings without names: the same weights under another name share pages."""
    ignored = {"_name_or_path", "transformers_version", "id2label", "label2id"}
    return {key: value for key, value in settings.items() if key not in ignored}


def _index_keys(settings: dict[str, Any], runner: Any) -> dict[str, object]:
    """What decides, beside its weights, how a model with sparse attention writes index keys; none
    of it is usual. Latents of all layers but the first depend on the tokens that were chosen."""
    if settings.get("index_topk") is None:
        return {}
    written = {name: os.environ[name] for name in _INDEX_KEYS if name in os.environ}
    device = "hip" if torch.version.hip is not None else str(runner.device)
    if device not in ("cuda", "cpu"):  # others turn keys by rules of their own
        fused = getattr(runner.server_args, "enable_dsa_fused_indexer", None)
        written |= {"device": device, "fused": str(fused)}
    return {"index_keys": written} if written else {}
