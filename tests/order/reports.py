"""What is reported without each edge: the proof that it is needed, and that it is looked at."""

from typing import NamedTuple


class Report(NamedTuple):
    """What a scenario reports when an edge is left out.

    Attributes:
        scenario: Its name.
        what: First line of one of its findings.
        partition: With which one a scenario is served.
        query: How events answer, see ``Query``.
    """

    scenario: str
    what: str
    partition: str = "mixed"
    query: str = "lazy"


UNIT = {
    "capture/ledger.py:copy_wanted now.keep(values)": Report(
        "capture", "device memory of schedule dies while forward may use it"
    ),
    "capture/staging.py:_wait_for_rows current_stream(self.device).wait(last)": Report(
        "capture", "forward writes what hcache transfer reads"
    ),
    "capture/staging.py:_move_layer now.wait(moved)": Report(
        "capture", "forward writes what hcache transfer reads"
    ),
    "capture/staging.py:_move_layer self._transfer.wait(now.record())": Report(
        "capture", "hcache transfer reads what forward writes"
    ),
    "capture/staging.py:end transfer.wait(current_stream(self.device).record())": Report(
        "capture", "hcache transfer reads what forward writes"
    ),
    "capture/staging.py:_save self._transfer.keep(step.marks)": Report(
        "capture", "device memory of forward dies while hcache transfer may use it"
    ),
    "capture/staging.py:_save self._transfer.keep(step.where)": Report(
        "capture", "device memory of forward dies while hcache transfer may use it"
    ),
    "capture/hooks.py:_begin capture.give_up_step()": Report(
        "capture, a step that cannot begin", "forward writes what hcache transfer reads"
    ),
    "krul/plugin.py:_ask_next forwards.wait(current_stream(keys.device).record())": (
        Report("probes", "forward reads what schedule writes")
    ),
    "krul/plugin.py:_ask_next forwards.keep(keys)": Report(
        "probes", "device memory of schedule dies while forward may use it"
    ),
    "prefetch/eager.py:until_written restore.wait()": Report(
        "eager", "forward writes what hcache compute writes"
    ),
    "restore/exchange.py:forward_begins self._forward.wait(event)": Report(
        "restore, between ranks", "forward writes what hcache copy writes"
    ),
    "restore/exchange.py:restore_begins stream.wait(launched)": Report(
        "restore, between ranks", "hcache copy writes what forward writes"
    ),
    "restore/pipeline.py:start self._copy.wait(behind)": Report(
        "loads", "hcache copy reads what schedule writes"
    ),
    "restore/pipeline.py:start stream.keep(tensor)": Report(
        "loads", "device memory of host to device dies while hcache copy may use it"
    ),
    "restore/pipeline.py:_recompute forward.wait(behind)": Report(
        "restore, first layers recomputed", "forward reads what schedule writes"
    ),
    "restore/pipeline.py:_recompute forward.wait(event)": Report(
        "eager, behind what was restored ahead", "forward reads what hcache copy writes"
    ),
    "restore/pipeline.py:_recompute forward.wait(self._copy.record())": Report(
        "restore, between ranks", "forward writes what hcache copy writes"
    ),
    "restore/pipeline.py:_recompute forward.keep(slots)": Report(
        "eager", "device memory of schedule dies while forward may use it"
    ),
    "restore/pipeline.py:start self._compute.wait(done)": Report(
        "restore, between ranks", "hcache copy writes what forward writes"
    ),
    "restore/pipeline.py:_fill self._compute.wait(copied)": Report(
        "restore, mixed", "hcache compute reads what hcache copy writes"
    ),
    "restore/report.py:save stream.wait(self.layers[-1])": Report(
        "eager, from the back", "hcache saves reads what forward writes"
    ),
    "restore/report.py:save stream.keep(slots)": Report(
        "eager, from the back", "device memory of schedule dies while hcache saves may use it"
    ),
    "capture/hooks.py:save current_stream(capture.device).keep(rows)": Report(
        "eager, from the back, hidden states",
        "device memory of forward dies while hcache saves may use it",
    ),
    "restore/report.py:wait_for_layer current_stream(self.device).wait(self.layers[layer])": Report(
        "restore, mixed", "forward reads what hcache compute writes"
    ),
    "restore/report.py:wait current_stream(self.device).wait(event)": Report(
        "eager", "forward writes what hcache compute writes"
    ),
    "restore/ring.py:next stream.wait(until)": Report(
        "restore, hidden states", "hcache copy writes what hcache compute reads"
    ),
    "host/loads.py:launch current_stream(self._device).wait(restore.layers[0])": Report(
        "loads, recomputation fails", "hcache copy writes what forward writes"
    ),
    "host/loads.py:fill now.keep(span.prefix)": Report(
        "loads", "device memory of schedule dies while forward may use it"
    ),
    "host/loads.py:fill current_stream(slots.device).keep(slots)": Report(
        "eager, behind an unknown prefix",
        "device memory of host to device dies while forward may use it",
    ),
}
"""By the ``str`` of the edge; scenarios of ``scenarios.py``."""

ENCODED = {
    "prefetch/eager.py:until_written restore.wait()": Report(
        "eager, encoded", "forward writes what hcache copy writes"
    ),
    "restore/exchange.py:forward_begins self._forward.wait(event)": Report(
        "restore, between ranks, encoded", "forward writes what hcache copy writes"
    ),
    "restore/exchange.py:restore_begins stream.wait(launched)": Report(
        "restore, between ranks, encoded", "hcache copy writes what forward writes"
    ),
    "restore/pipeline.py:_recompute forward.wait(self._copy.record())": Report(
        "restore, between ranks, encoded", "forward writes what hcache copy writes"
    ),
    "restore/pipeline.py:start self._compute.wait(done)": Report(
        "restore, between ranks, encoded", "hcache copy writes what forward writes"
    ),
    "restore/pipeline.py:start self._copy.wait(behind)": Report(
        "loads, encoded", "hcache copy writes what forward writes"
    ),
    "restore/pipeline.py:start stream.keep(tensor)": Report(
        "eager, encoded", "device memory of host to device dies while hcache copy may use it"
    ),
    "restore/report.py:wait_for_layer current_stream(self.device).wait(self.layers[layer])": Report(
        "restore, encoded", "forward reads what hcache copy writes"
    ),
    "restore/report.py:wait current_stream(self.device).wait(event)": Report(
        "eager, encoded", "forward writes what hcache copy writes"
    ),
}
"""Likewise, over pages with encoded K and V."""

_SHARED = "restore, latents between ranks"
LATENTS = {
    "restore/exchange.py:forward_begins self._forward.wait(event)": Report(
        _SHARED, "forward writes what hcache copy writes"
    ),
    "restore/exchange.py:restore_begins stream.wait(launched)": Report(
        _SHARED, "hcache copy writes what forward writes"
    ),
    "restore/pipeline.py:_recompute forward.wait(self._copy.record())": Report(
        _SHARED, "forward writes what hcache copy writes"
    ),
    "restore/pipeline.py:start self._compute.wait(done)": Report(
        _SHARED, "hcache copy writes what forward writes"
    ),
    "restore/pipeline.py:_fill self._compute.wait(copied)": Report(
        _SHARED, "hcache compute reads what hcache copy writes"
    ),
    "restore/ring.py:next stream.wait(until)": Report(
        _SHARED, "hcache copy writes what hcache compute reads"
    ),
    "restore/report.py:wait_for_layer current_stream(self.device).wait(self.layers[layer])": Report(
        _SHARED, "forward reads what hcache compute writes"
    ),
}
"""Likewise, over pages of latents, which ranks share."""

IN_PROCESS = {
    "sglang/controller.py:after_forwards "
    "stream.wait(streams.current_stream(self.device).record())": Report(
        "eager", "hcache copy reads what schedule writes"
    ),
    "prefetch/eager_loads.py:_begin self._controller.after_forwards(self._stream)": Report(
        "eager", "hcache copy writes what forward writes"
    ),
}
"""Likewise; the scenario needs SGLang and no server: ``in_process/hits/test_order.py``."""

SERVED = {
    "sglang/controller.py:start_writing "
    "self.after_forwards(streams.of(self.l2_transfer_engine.device_to_host_stream))": Report(
        "conversations", "device to host reads what forward writes", "kv"
    ),
    "sglang/controller.py:after_forwards "
    "stream.wait(streams.of(self.load_fence_stream).record())": Report(
        "conversations", "device to host reads what forward writes", "kv"
    ),
    "sglang/host_pool.py:_save current_stream(device).wait(self._capture.transfers())": Report(
        "conversations", "device to host reads what hcache transfer writes", query="late"
    ),
    "sglang/host_pool.py:load_to_device_per_layer restore.wait_for_layer(layer_id)": Report(
        "conversations", "forward reads what hcache compute writes"
    ),
}
"""Likewise; scenarios of ``test_engine.py``. Backups of hidden states are put off until the forward
passes that fill them are known to be done; those of K and V alone are not."""
