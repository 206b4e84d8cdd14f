"""Arguments mean to us what they mean to SGLang, in every supported version.

A name that stays can get another meaning in SGLang's resolution of its arguments, and contracts of
names do not see it. So each command line is resolved by the version itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, NamedTuple

import pytest

from bench.harness.models import build_model
from hcache_backend.sglang.compat import SUPPORTED
from tests.contract.versions import ROOT, source
from tests.cpu_engine.hcache_cpu_engine import cpu_engine_env
from tests.kit.models import MODELS

OWN, HIDDEN, RECOMPUTE = "own pages", "hidden states", "recomputation"
EAGER, JUDGING = "restores while L3 is read", "judging L3 hits"
MODULES = [HIDDEN, RECOMPUTE]
USUAL: dict[str, Any] = {
    "without": [], "ranks": 1, "groups": 1, "stored by": [1, 1], "page": 64, "drafted": 1,
    "roles": [], "whole graphs": False, "attach": False,
}  # fmt: skip


class Row(NamedTuple):
    """A command line, its answers that are not the usual ones, the oldest version that takes it,
    and the last one if not the newest."""

    line: str
    answers: dict[str, Any]
    since: str = SUPPORTED[0]
    until: str = SUPPORTED[-1]


def ranks(own: int, groups: int = 1, **others: Any) -> dict[str, Any]:
    """Of a server whose requests are computed by ``own`` ranks each, in ``groups``."""
    without = {"without": MODULES} if groups > 1 else {}
    return {"ranks": own, "groups": groups, "stored by": [own, 1], **without, **others}


TABLE = [
    Row("", {}),
    Row("--page-size 16", {"page": 16}),
    Row("--tp-size 2", ranks(2)),
    Row("--tensor-parallel-size 4", ranks(4)),
    Row("--tp-size 2 --dp-size 2", ranks(2)),
    Row("--dp-size 2", {}),
    Row("--tp-size 2 --dp-size 2 --enable-dp-attention", ranks(1, 2)),
    Row("--tp-size 4 --dp-size 2 --enable-dp-attention", ranks(2, 2)),
    Row("--tp-size 8 --dp-size 8 --enable-dp-attention", ranks(1, 8)),
    Row("--tp-size 2 --enable-dp-attention", ranks(2)),
    Row("--tp-size 2 --attn-dp-size 2", ranks(1, 2), "0.5.22"),
    Row("--tp-size 8 --attn-dp-size 4", ranks(2, 4), "0.5.22"),
    Row("--tp-size 4 --attn-dp-size 2 --enable-dp-attention", ranks(2, 2), "0.5.22"),
    Row("--pp-size 2", {"without": [EAGER], "stored by": [1, 2]}),
    Row("--tp-size 2 --pp-size 2", ranks(2) | {"without": [EAGER], "stored by": [2, 2]}),
    Row("--disaggregation-mode prefill", {"roles": ["prefill"]}),
    Row("--disaggregation-mode decode --disaggregation-decode-enable-radix-cache"
        " --disaggregation-transfer-backend nixl",
        {"without": [OWN, JUDGING], "roles": ["decode"]}),
    Row("--enable-pd-role-switch --disaggregation-mode prefill",
        {"without": [OWN, JUDGING], "roles": ["decode", "prefill"]}),
    Row("--hicache-host-memory-mode buffer_only --hicache-storage-backend file",
        {"without": [EAGER, JUDGING]}),
    Row("--enable-deterministic-inference", {"without": MODULES}),
    Row("--enable-torch-compile", {"without": MODULES}),
    Row("--cuda-graph-backend-prefill full", {"without": MODULES, "whole graphs": True}),
    Row("--cuda-graph-backend-prefill breakable", {}),
    Row("--cuda-graph-backend-prefill tc_piecewise", {"without": MODULES}, until="0.5.21"),
    Row("--disable-cuda-graph", {}),
    Row("--enable-two-batch-overlap --moe-a2a-backend none", {"without": MODULES}),
    Row("--enable-lora --max-lora-rank 8 --lora-target-modules q_proj", {"without": MODULES}),
    Row("--enable-pdmux", {"without": [RECOMPUTE]}),
    Row("--speculative-algorithm NGRAM --attention-backend flashinfer",
        {"without": [HIDDEN], "drafted": 12}),
    Row("--speculative-algorithm NGRAM --speculative-ngram-max-bfs-breadth 1",
        {"drafted": 12}),
    Row("--speculative-algorithm STANDALONE --speculative-draft-model-path {model}"
        " --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
        {"drafted": 4}),
    Row("--speculative-algorithm STANDALONE --speculative-draft-model-path {model}"
        " --speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 4",
        {"without": [HIDDEN], "drafted": 4}),
    Row("--enable-priority-scheduling", {"attach": True}, until="0.5.21"),
    Row("--enable-priority-scheduling", {}, "0.5.22"),
    Row("--enable-priority-scheduling --disable-priority-preemption", {}),
    # SGLang refuses them without their plug-in, GPU or model: here only their names are seen.
    Row("--enable-nvidia-megakernel", {"unknown": "'nvidia_megakernel' plugin"}, "0.5.23"),
    Row("--enable-amd-monokernel", {"unknown": "no GPU is visible"}, "0.5.23"),
    Row("--enable-kv-cache-sharding --disaggregation-mode prefill --tp-size 2"
        " --attention-backend fa3", {"unknown": "--enable-kv-cache-sharding"}, "0.5.22"),
    Row("--attn-cp-size 2 --tp-size 2", ranks(2) | {"without": [OWN]}),
    Row("--dcp-size 2 --tp-size 2", {"unknown": "only supported for MLA"}),
]  # fmt: skip


@pytest.mark.parametrize("version", SUPPORTED)
def test_command_lines_mean_to_us_what_they_mean_to_sglang(version: str) -> None:
    model = str(build_model("llama", MODELS))
    path = os.pathsep.join([str(source(version).root), cpu_engine_env()["PYTHONPATH"], str(ROOT)])
    lines = [row.line.format(model=model).split() for row in TABLE]
    run = subprocess.run(
        [sys.executable, "-m", "tests.contract.meanings", model],
        cwd=ROOT,
        env={**os.environ, **cpu_engine_env(), "PYTHONPATH": path},
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    here, wrong = SUPPORTED.index(version), []
    for row, found in zip(TABLE, json.loads(run.stdout.splitlines()[-1]), strict=True):
        if SUPPORTED.index(row.since) <= here <= SUPPORTED.index(row.until):
            differ = differences(found, row.answers)
            wrong += [f"{row.line!r}: {differ}"] if differ else []
    assert not wrong, "\n".join(wrong)


def differences(found: dict[str, Any], answers: dict[str, Any]) -> str:
    """Answers that are other ones than a row has, with the right ones; empty if there are none."""
    if "unknown" in found or "unknown" in answers:
        said = str(found.get("unknown", "it is taken"))
        return "" if answers.get("unknown", "(never)") in said else said
    wanted = USUAL | answers
    wrong = [f"{n} is {found[n]}, not {wanted[n]}" for n in wanted if found[n] != wanted[n]]
    return ", ".join(wrong)
