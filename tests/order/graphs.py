"""Decode graphs on a CPU: the kernels of a decode step run again, and no Python of the product.

SGLang records a decode step once for each of a few batch sizes and replays it on static inputs; a
batch is filled up to the next size. What was recorded of the product are its copies to staging. In
a replay neither its hooks nor HiCache's wait for a layer run, and the barrier that lets the
scheduler write what forward passes read is published before the step has done anything.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

SIZES = (1, 2, 4, 8)
"""Requests of the batches that are recorded; larger ones run without a graph."""
INPUTS = {"input_ids": 0, "positions": 0, "req_pool_indices": 0, "out_cache_loc": 0, "seq_lens": 1}
"""Static inputs, int64 ``[size]``, and what fills them up behind the requests of a batch."""


class DecodeGraphs:
    """In the place of SGLang's runner of decode graphs.

    A CPU cannot record kernels, so the model runs again in a replay, without the product's hooks;
    the copies to staging that were recorded (with ``copies``) run where they stood, for all rows.
    """

    def __init__(self, new_event: Callable[[], Any], *, copies: bool) -> None:
        self.replays = 0  # forward passes that were replays
        self._copies = copies
        self._new_event = new_event
        self._replaying = False
        self._recording: int | None = None
        self._staged: dict[int, list[int]] = {size: [] for size in SIZES}
        self._batches: dict[int, Any] = {}
        self._runner: Any = None

    def install(self, around: Callable[[Any, str, Callable[..., Any]], None]) -> None:
        """Decode steps of SGLang and of the product are graphs from here on; before SGLang would
        record any. ``around``: as in ``tests/kit``."""
        from sglang.srt.managers.cache_controller import LayerDoneCounter
        from sglang.srt.model_executor.model_runner import ModelRunner

        from hcache_backend.capture.hooks import HiddenCapture
        from hcache_backend.start import build

        def init(original: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
            with _as_on_a_gpu(runner):
                build.record_copies(build.current(), runner)
            original(runner, *args, **kwargs)
            self._record(runner)
            runner.decode_cuda_graph_runner = self

        checked = build.check_recording

        def check_recording(runtime: Any, hidden: Any) -> Any:
            with _as_on_a_gpu(runtime.runner):
                return checked(runtime, hidden)

        def wait_until(original: Any, counter: Any, layer: int) -> None:
            if not self._replaying:
                original(counter, layer)

        build.graphs_are_off = lambda: False
        build._largest_recorded_tokens = lambda _tokens: SIZES[-1]
        build.check_recording = check_recording
        around(ModelRunner, "init_cuda_graphs", init)
        around(HiddenCapture, "_take", self._take)
        around(LayerDoneCounter, "wait_until", wait_until)

    # ---- what SGLang asks of its runner of decode graphs ----

    def can_run_graph(self, batch: Any) -> bool:
        return bool(batch.batch_size <= SIZES[-1])

    def execute(self, batch: Any, pp_proxy_tensors: Any = None) -> Any:
        count = batch.batch_size
        static = self._batches[next(size for size in SIZES if size >= count)]
        for name, padding in INPUTS.items():
            buffer = getattr(static, name)
            buffer[:count].copy_(getattr(batch, name))
            buffer[count:].fill_(padding)
        event = self._new_event()
        event.record()
        self._runner.shared_read_done_event = event
        self._replaying = True
        try:
            output = self._run(static)
        finally:
            self._replaying = False
        self.replays += 1
        logits = output.next_token_logits[:count]
        return dataclasses.replace(output, next_token_logits=logits)

    # ---- recorded batches ----

    def _record(self, runner: Any) -> None:
        """Run every batch size once; the product's hooks see SGLang recording."""
        from sglang.srt.model_executor.forward_batch_info import (
            CaptureHiddenMode,
            ForwardBatch,
            ForwardMode,
        )

        self._runner = runner
        for size in SIZES:
            inputs = {
                name: torch.full((size,), padding, dtype=torch.int64, device=runner.device)
                for name, padding in INPUTS.items()
            }
            self._batches[size] = ForwardBatch(
                forward_mode=ForwardMode.DECODE,
                batch_size=size,
                seq_lens_sum=size,
                capture_hidden_mode=CaptureHiddenMode.NULL,
                spec_algorithm=runner.spec_algorithm,
                **inputs,
            )
            self._recording = size
            self._run(self._batches[size])
        self._recording = None

    def _run(self, batch: Any) -> Any:
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        runner = self._runner
        with torch.inference_mode(), forward_context(ForwardContext(runner.attn_backend)):
            runner.attn_backend.init_forward_metadata(batch)
            return runner.model.forward(batch.input_ids, batch.positions, batch)

    def _take(self, original: Any, hooks: Any, layer: int, hidden: Any) -> None:
        """A hook of the product is called in a layer."""
        if not self._replaying:
            if self._recording is not None and self._copies:
                self._staged[self._recording].append(layer)
            original(hooks, layer, hidden)
        elif layer in self._staged[len(hidden)]:
            hooks.staging.stage(layer, hidden, len(hidden))


@contextmanager
def _as_on_a_gpu(runner: Any) -> Iterator[None]:
    """Within the block the product takes ``runner`` for a GPU's: on a CPU no graph is recorded."""
    device, runner.device = runner.device, "cuda"
    try:
        yield
    finally:
        runner.device = device
