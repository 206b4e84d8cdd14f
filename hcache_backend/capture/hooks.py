"""Capture: take the hidden states out of the forward pass, for every token of every step, and of
pages that are recomputed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Any

import torch

from hcache_backend import metrics
from hcache_backend.arena import Ids
from hcache_backend.capture.staging import StagedCapture, Staging, Step, stored_rows
from hcache_backend.metrics import logger
from hcache_backend.restore.layers import Recompute
from hcache_backend.streams import current_stream, host_tensor, to_device
from hcache_kernels.staging import save_rows

_EMBEDDINGS = ("input_embeds", "replace_embeds")  # of a batch whose requests bring their own


class HiddenCapture:
    """Hands each layer's projection input to the staged capture. ``layers``: for each one its
    attention module, and the linear modules in it. Nothing here raises into the forward pass. The
    projection of a layer is the linear module that is fed first after its attention module was
    called. So hooks on both can be there before SGLang records its CUDA graphs. Once projections
    are known, ours stands around the ``forward`` of each: torch's hooks take longer."""

    def __init__(self, layers: Sequence[tuple[torch.nn.Module, Iterable[torch.nn.Module]]]) -> None:
        self.staging: Staging | None = None  # recorded CUDA graphs copy to it
        self._capture: StagedCapture | None = None  # None until its check has passed
        self._trial = self._tokens_only = False  # nothing is counted; only token ids, no embeddings
        self._diverted_to: Callable[[int, object], None] | None = None  # instead of the capture
        self._thread = get_ident()  # of forward passes
        self._called = [False] * len(layers)  # and no linear module of the layer was fed yet
        self._hooks: list[Any] = []
        self._complained = self._noted_unfit = False
        for index, (module, linears) in enumerate(layers):
            self._hooks.append(module.register_forward_pre_hook(partial(self._on_call, index)))
            for linear in linears:
                on_input = partial(self._on_linear, index)
                self._hooks.append(linear.register_forward_pre_hook(on_input, with_kwargs=True))

    def remove(self) -> None:
        """End capture for good: remove all hooks, and free the staging memory on the device."""
        self._capture = None
        self.watch_only(())
        staging, self.staging = self.staging, None
        if staging is not None:
            staging.free()

    def watch_only(self, projections: Iterable[torch.nn.Module]) -> None:
        """Watch only these modules from now on: the projections that were found, one a layer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            _InputHook(projection, partial(self._take, index))
            for index, projection in enumerate(projections)
        ]

    def use(self, capture: StagedCapture, *, tokens_only: bool) -> None:
        """Capture every forward pass from now on; ``tokens_only``: not those that cannot be
        recomputed from token ids."""
        self._capture, self._tokens_only = capture, tokens_only

    @contextmanager
    def capture_trial(self, capture: StagedCapture) -> Iterator[None]:
        """Within the block ``capture`` captures every forward pass; metrics do not count them."""
        self._capture, self._trial = capture, True
        try:
            yield
        finally:
            self._capture, self._trial = None, False

    @contextmanager
    def divert_to(self, take: Callable[[int, object], None]) -> Iterator[None]:
        """Within the block ``take(layer, hidden)`` gets the inputs of projections; it may raise."""
        self._diverted_to = take
        try:
            yield
        finally:
            self._diverted_to = None

    def forward(self, batch: Any, run: Callable[[], Any]) -> Any:
        """Run one forward pass of SGLang's ``batch`` by ``run``, and capture it if possible."""
        if (capture := self._capture) is None:
            return run()
        self._thread = get_ident()
        self._log_errors(capture.ledger.pass_begins)
        step = self._log_errors(self._begin, capture, batch)
        output = run()
        if step is not None:
            replayed = bool(getattr(output, "can_run_graph", False))
            self._log_errors(self._end, capture, step, replayed)
        return output

    def _log_errors(self, work: Callable[..., Any], *args: object) -> Any:
        """The result of ``work(*args)``; None if that raised, which is logged."""
        try:
            return work(*args)
        except Exception as error:
            self._note_error(error)
            return None

    def _note_error(self, error: Exception) -> None:
        logger.debug("hcache: capture failed", exc_info=error)
        self._complain(f"{type(error).__name__}: {error}")

    def _begin(self, capture: StagedCapture, batch: Any) -> Step | None:
        """Begin to capture the pass over SGLang's ``batch``; None: it is not captured."""
        try:
            self._publish(capture)
            return self._begin_step(capture, batch)
        except Exception:
            capture.give_up_step()
            if (slots := _slots(batch)) is not None:
                capture.ledger.note_not_captured(slots)
            raise

    def _begin_step(self, capture: StagedCapture, batch: Any) -> Step | None:
        """Begin to capture ``batch``; None if it lacks what pages need, which voids its slots."""
        slots = _slots(batch)
        ids, positions = batch.input_ids, batch.positions
        if slots is None or slots.numel() == 0:
            capture.skip()
            return None
        problem = None
        if ids is None or positions is None:
            problem = "a step without token ids or positions"
        elif positions.dim() != 1:
            problem = "a step with positions of several dimensions"
        elif self._tokens_only and any(getattr(batch, n) is not None for n in _EMBEDDINGS):
            problem = "a step whose embeddings are not those of its tokens"
        elif not ids.shape == positions.shape == slots.shape:
            problem = "a step without one token id and position for each slot"
        if problem is not None:
            capture.skip()
            capture.ledger.note_not_captured(slots)
            self._complain(problem)
            return None
        step = capture.begin(slots, positions, ids)
        if step is None:
            self._complain(capture.ledger.broken or f"{len(slots)} tokens in one step")
        return step

    def _end(self, capture: StagedCapture, step: Step, replayed: bool) -> None:
        """Launch the transfer of a step's rows, or complain. ``replayed``: a CUDA graph ran it."""
        if capture.end(step, replayed=replayed):
            if not self._trial:
                metrics.TOKENS.count("captured", step.tokens)
                metrics.BYTES.count("captured", step.tokens * capture.row_bytes)
        elif replayed:
            self._complain(f"a CUDA graph of {step.tokens} tokens")
        else:
            self._complain(f"a step that showed each layer {step.layers_seen} times")

    def _on_call(self, index: int, *_: Any) -> None:
        self._called[index] = True

    def _on_linear(
        self, index: int, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Take the input of the first linear module that runs after layer ``index`` was called."""
        if self._called[index]:
            self._called[index] = False
            self._take(index, args[0] if args else next(iter(kwargs.values()), None))

    def _take(self, index: int, hidden: object) -> None:
        """Stage ``hidden``, the projection input of layer ``index``, or divert it."""
        if get_ident() != self._thread:
            return  # a restore may project with attention modules on a thread of its own
        if self._diverted_to is not None:
            self._diverted_to(index, hidden)
            return
        try:
            if self._capture is not None:
                self._capture.take(index, hidden)
            elif self.staging is not None:
                self.staging.record(index, hidden)
        except Exception as error:
            self._note_error(error)

    def _publish(self, capture: StagedCapture) -> None:
        """Add to metrics and log what the ledger has learned of earlier steps."""
        elapsed, missing, unfit = capture.ledger.take_counts()
        if elapsed:
            metrics.STAGE_SECONDS.observe("capture_transfer", elapsed / 1e3)
        metrics.TOKENS.add(not_written=missing, not_encodable=unfit)
        if missing:
            self._complain(f"{missing} tokens without the rows of every layer")
        if unfit and not self._noted_unfit:
            self._noted_unfit = True
            what = f"codec {capture.codec.name!r} cannot encode {unfit} tokens of this step"
            once = "(logged once, counted always)"
            logger.warning("hcache: %s; their pages do not go to L3 %s", what, once)

    def _complain(self, problem: str) -> None:
        metrics.PROBLEMS.count("capture")
        if not self._complained:
            self._complained = True
            logger.warning("hcache: not captured: %s (logged once, counted always)", problem)


class _InputHook:
    """Has ``module.forward`` first call ``on_input`` with the first argument of its call."""

    def __init__(self, module: torch.nn.Module, on_input: Callable[[object], None]) -> None:
        self._module, self._before = module, vars(module).get("forward")  # None: of the class
        forward = module.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            on_input(args[0] if args else next(iter(kwargs.values()), None))
            return forward(*args, **kwargs)

        module.forward = self._watched = watched

    def remove(self) -> None:
        """Put the original ``forward`` back, unless another hook was put around this one since."""
        if vars(self._module).get("forward") is not self._watched:
            return
        del self._module.forward
        if self._before is not None:
            self._module.forward = self._before


def _slots(batch: Any) -> Any:
    slots = getattr(batch, "out_cache_loc_virtual", None)
    return batch.out_cache_loc if slots is None else slots


@dataclass(eq=False)
class RecomputedRows:
    """Inputs of the projections of one slice. Scheduler thread only."""

    _capture: StagedCapture  # says how pages hold rows
    _staging: Staging  # says which rows these are
    _hooks: HiddenCapture  # see them
    _rows: torch.Tensor | None = None  # [layers, n, hidden], of the model's dtype
    _seen: list[int] = field(default_factory=list)  # of each layer, how many

    def with_rows_taken(self, recompute: Recompute) -> Recompute:
        """``recompute`` with a ``fill`` that also keeps the inputs of projections, for
        :meth:`save_rows`; it raises if a layer shows another number of rows than tokens."""
        tokens = len(recompute.slots)

        def fill() -> None:
            shape = self._staging.layers, tokens, self._staging.width
            device = recompute.slots.device
            self._rows = torch.empty(shape, dtype=self._staging.dtype, device=device)
            self._seen = [0] * len(self._rows)  # rows so far, by layer
            with self._hooks.divert_to(self._take):
                recompute.fill()
            if any(seen != tokens for seen in self._seen):
                raise RuntimeError(f"layers showed {self._seen} rows of {tokens}")

        return recompute._replace(fill=fill)

    def _take(self, layer: int, hidden: object) -> None:
        """Append rows (``[n, hidden]``) of ``layer``: a pass may compute its tokens in chunks."""
        assert self._rows is not None and isinstance(hidden, torch.Tensor)
        start = self._seen[layer]
        self._seen[layer] = stop = start + len(hidden)
        self._rows[layer, start:stop] = hidden

    def save_rows(self, pages: Ids) -> torch.Tensor:
        """Copy the taken rows to physical ``pages`` (int64 ``[p]``) of the arena, on the current
        stream. Returns a mask of pages that the codec holds, bool ``[p]`` on the CPU, once done."""
        capture, rows, self._rows = self._capture, self._rows, None
        assert rows is not None
        layout = capture.arena.layout
        current_stream(capture.device).keep(rows)
        marks = torch.zeros(rows.shape[:2], dtype=torch.int64, device=capture.device)
        table = to_device(pages, capture.device)
        slots = torch.arange(rows.shape[1], device=capture.device)
        encoded = stored_rows(capture.codec, rows.view(torch.uint8), marks) if len(rows) else ()
        for layer_part, token_part, stored in encoded:
            part, offsets, size = slots[token_part], capture.segments[layer_part], layout.page_size
            save_rows(stored, part, table, capture.memory, offsets, size, layout.kept)
        fits = (marks == 0).all(0).view(-1, layout.page_size).all(1)
        return host_tensor(fits.shape, torch.bool, capture.device).copy_(fits, non_blocking=True)
