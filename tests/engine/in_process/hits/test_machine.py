"""What is known of the machine before L3 hits were measured in service."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch

from hcache_backend.config import ConfigError, HCacheConfig
from hcache_backend.plan.profile import Profile, Rate, preset_profile
from hcache_backend.sglang import arguments
from hcache_backend.start import machine as start
from tests.kit.host import kv_pool

MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
}


GROUPS = "get_pp_group", "get_attn_tp_group", "get_attn_cp_group"


@pytest.fixture
def unmeasured(runtime: Any, monkeypatch: MonkeyPatch) -> Any:
    """A rank of a server with tp 4, dp 2 whose partition needed no profile."""
    from sglang.srt.distributed import parallel_state

    device = kv_pool()
    device.dtype = torch.bfloat16
    model = MODEL | {"num_hidden_layers": device.layer_num}
    runtime.options.config = HCacheConfig()
    runtime.runner = SimpleNamespace(
        token_to_kv_pool=device,
        dtype=torch.bfloat16,
        device="cpu",
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(to_dict=lambda: model),
            get_num_kv_heads=lambda ranks: MODEL["num_key_value_heads"] // ranks,
        ),
        server_args=SimpleNamespace(tp_size=4, dp_size=2, enable_dp_attention=True, pp_size=1),
    )
    for name in GROUPS:
        alone = SimpleNamespace(is_first_rank=True, world_size=1)
        monkeypatch.setattr(parallel_state, name, lambda group=alone: group)
    for module in (start, arguments):
        monkeypatch.setattr(module, "resolved", lambda arguments: arguments)
    return runtime


@pytest.mark.parametrize(
    ("used", "share"), [("exp4", 0.766), ("none, exp4 of K and V", 0.766), ("none", 1), (None, 1)]
)
def test_hits_are_judged_by_the_bytes_that_k_and_v_are_stored_in(
    used: str | None, share: float, unmeasured: Any, monkeypatch: MonkeyPatch
) -> None:
    unmeasured.pages.codec = used
    profile = Profile.model_construct(l3=Rate(per_second=1e6))
    monkeypatch.setattr(start, "find_profile", lambda *_: profile)
    machine = start._machine(unmeasured, unmeasured.options.config)
    assert machine is not None and machine.ranks == 2
    layers = unmeasured.runner.token_to_kv_pool.layer_num
    plain = 2 * layers * 2 * 16 * 2  # K and V of a token
    assert machine.read(1000, 0) == pytest.approx(1000 * share * plain / 1e6, rel=0.001)


class Group:
    """Two ranks of a group, one after the other; each hears what the other one will say."""

    world_size = 2

    def __init__(self, other: list[Any], *, first: bool) -> None:
        self.is_first_rank, self._other = first, other

    def all_gather_object(self, own: Any) -> list[Any]:
        said = [own, self._other] if self.is_first_rank else [self._other, own]
        self.own = own
        return said


def test_every_group_of_dp_attention_finds_its_profile(
    unmeasured: Any, monkeypatch: MonkeyPatch
) -> None:
    """Ranks 2 and 3 of 4 attach without ranks 0 and 1."""
    from sglang.srt.distributed import parallel_state

    from hcache_backend.sglang import groups as ranks

    looked, profile = [], preset_profile("h100", 1)
    monkeypatch.setattr(ranks.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(start, "find_profile", lambda *_: looked.append(1) or profile)
    whole = SimpleNamespace(is_first_rank=False, world_size=4)
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: whole)
    said: list[Any] = [(None, None)]
    machines = []
    for first in (True, False):
        group = Group(said, first=first)
        monkeypatch.setattr(parallel_state, "get_attn_tp_group", lambda group=group: group)
        machines.append(start._machine(unmeasured, unmeasured.options.config))
        said = group.own
    assert looked == [1]
    assert [machine is not None and machine.profile for machine in machines] == [profile, profile]


def test_an_unreadable_profile_is_an_error_with_any_l3(
    unmeasured: Any, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "may_judge", lambda *_: True)
    unmeasured.options.config = HCacheConfig(profile=Path("/nowhere/profile.json"))
    with pytest.raises(ConfigError, match="option 'profile': cannot read"):
        start.judge_hits(unmeasured, unmeasured.options.config)
    with pytest.raises(ConfigError, match="option 'profile': cannot read"):
        start.judge_hits(unmeasured, unmeasured.options.config, "file")
    assert unmeasured.hit_gate is None


def test_of_another_l3_only_the_machine_is_known(unmeasured: Any, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(start, "may_judge", lambda *_: True)
    monkeypatch.setattr(start, "find_profile", lambda *_: preset_profile("h100", 1))
    start.judge_hits(unmeasured, unmeasured.options.config, "file")
    costs = unmeasured.l3.estimates
    assert costs.read.seconds(1000) is None
    assert costs.prefill.seconds(1000) and costs.load.seconds(1000)
