"""What is reported without each edge: the proof that it is needed, and that it is looked at."""

from typing import NamedTuple


class Report(NamedTuple):
    """What a scenario reports when an edge is left out."""

    scenario: str
    what: str  # first line of one of its findings
    partition: str = "mixed"  # of the server
    query: str = "lazy"  # how events answer, see ``Query``


_BETWEEN_RANKS = [
    "restore/exchange.py:forward_begins self._forward.wait(event)",
    "restore/exchange.py:restore_begins stream.wait(launched)",
    "restore/pipeline.py:_recompute forward.wait(self._copy.record())",
    "restore/pipeline.py:start self._compute.wait(done)",
]
_LAYER = "restore/report.py:wait_for_layer current_stream(self.device).wait(self.layers[layer])"

UNIT = {
    "capture": [
        "capture/ledger.py:copy_wanted stream.keep(values)",
        "capture/staging.py:_wait_for_rows current_stream(self.device).wait(last)",
        "capture/staging.py:_move_layer now.wait(moved)",
        "capture/staging.py:_move_layer self._transfer.wait(now.record())",
        "capture/staging.py:end transfer.wait(current_stream(self.device).record())",
        "capture/staging.py:_save self._transfer.keep(step.marks)",
        "capture/staging.py:_save self._transfer.keep(step.token_table)",
    ],
    "capture, a step that cannot begin": ["capture/hooks.py:_begin capture.give_up_step()"],
    "probes": [
        "krul/plugin.py:_observe_next forwards.wait(current_stream(keys.device).record())",
        "krul/plugin.py:_observe_next forwards.keep(keys)",
    ],
    "eager": [
        "prefetch/reservations.py:wait_until_written restore.wait()",
        "restore/report.py:wait current_stream(self.device).wait(event)",
    ],
    "eager, behind what was restored ahead": ["restore/pipeline.py:_recompute forward.wait(event)"],
    "eager, encoded": [
        "prefetch/reservations.py:wait_until_written restore.wait()",
        "restore/pipeline.py:start stream.keep(tensor)",
        "restore/report.py:wait current_stream(self.device).wait(event)",
    ],
    "eager, from the back": [
        "restore/report.py:save_recomputed stream.wait(self.layers[-1])",
        "restore/report.py:save_recomputed stream.keep(slots)",
        "restore/pipeline.py:_recompute forward.keep(recompute.slots)",
    ],
    "eager, from the back, hidden states": [
        "capture/hooks.py:save_rows current_stream(capture.device).keep(rows)"
    ],
    "loads": [
        "restore/pipeline.py:start self._copy.wait(behind)",
        "restore/pipeline.py:start stream.keep(tensor)",
        "host/loads.py:fill now.keep(span.prefix)",
    ],
    "loads, encoded": ["restore/pipeline.py:start self._copy.wait(behind)"],
    "loads, recomputation fails": [
        "host/loads.py:launch current_stream(self._device).wait(restore.layers[0])"
    ],
    "restore, between ranks": _BETWEEN_RANKS,
    "restore, between ranks, encoded": _BETWEEN_RANKS,
    "restore, latents between ranks": [
        *_BETWEEN_RANKS,
        "restore/pipeline.py:_fill self._compute.wait(copied)",
        "restore/ring.py:next stream.wait(until)",
        _LAYER,
    ],
    "restore, encoded": [_LAYER],
    "restore, first layers recomputed": ["restore/pipeline.py:_recompute forward.wait(behind)"],
    "restore, hidden states": ["restore/ring.py:next stream.wait(until)"],
    "restore, mixed": ["restore/pipeline.py:_fill self._compute.wait(copied)", _LAYER],
}
"""By scenario of ``scenarios.py`` edges, without each of which it reports something:
``tests/goldens/recorded/edges.txt`` has all that it reports then."""

IN_PROCESS = {
    "sglang/controller.py:after_forwards "
    "stream.wait(streams.current_stream(self.device).record())": Report(
        "eager", "hcache copy reads what schedule writes"
    ),
    "prefetch/eager_loads.py:_reserve controller.after_forwards(self._stream)": Report(
        "eager", "hcache copy writes what forward writes"
    ),
}
"""By edge, where the scenario needs SGLang and no server: ``in_process/hits/test_order.py``."""

SERVED = {
    "sglang/controller.py:start_writing "
    "self.after_forwards(streams.wrap_engine_stream(engine_stream))": Report(
        "conversations", "device to host reads what forward writes", "kv"
    ),
    "sglang/controller.py:after_forwards "
    "stream.wait(streams.wrap_engine_stream(self.load_fence_stream).record())": Report(
        "conversations", "device to host reads what forward writes", "kv"
    ),
    "capture/staging.py:go_before stream.wait(self.transfers())": Report(
        "conversations", "device to host reads what hcache transfer writes", query="late"
    ),
    "sglang/host_pool.py:load_to_device_per_layer restore.wait_for_layer(layer_id)": Report(
        "conversations", "forward reads what hcache compute writes"
    ),
}
"""Likewise; scenarios of ``test_engine.py``. Backups of hidden states are put off until the forward
passes that fill them are known to be done; those of K and V alone are not."""
