"""Models, tensors and calls of unusual forms, each refused or taken as its text says."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hcache_backend import fingerprint
from hcache_backend.plan import profile
from hcache_backend.plan.model_config import _Fields, _kv_heads, _latent, _mlp_width
from hcache_backend.prefetch import estimates
from hcache_backend.projection import search
from hcache_backend.projection.attention import UnknownCall, learn_call


def fields(**table: Any) -> _Fields:
    return _Fields(table, "a test")


def test_fields_of_a_model_stand_where_its_family_puts_them() -> None:
    assert fields(attn_config={"kv_n_heads": 8}, d_model=64).integer("heads", ("kv_n_heads",)) == 8
    latent = _latent(fields(kv_lora_rank=512, qk_rope_head_dim=64))
    assert latent is not None and (latent.rank, latent.rope_dim) == (512, 64)
    assert _kv_heads(fields(multi_query_attention=True, multi_query_group_num=2), 32) == 2


def test_the_shared_expert_of_llama4_is_counted() -> None:
    table = {"num_local_experts": 8, "num_experts_per_tok": 1, "intermediate_size": 96}
    table |= {"num_hidden_layers": 2, "hidden_size": 64}
    other = _mlp_width(fields(**table, model_type="mixtral"), 64)
    assert _mlp_width(fields(**table, model_type="llama4_text"), 64) == other + 96


def test_a_processor_without_a_name_is_its_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "Path", lambda name: Path("/nowhere"))
    monkeypatch.setattr(profile.platform, "machine", lambda: "riscv64")
    assert profile.processor_name() == "riscv64"


def test_the_median_of_weights_that_do_not_add_up_is_the_largest_value() -> None:
    """Halves of sums of many parts may be larger than the sum of the same parts in order."""
    assert estimates._median([(1.0, 1.0), (2.0, 1.0), (3.0, 1.0)]) == 2.0
    assert estimates._median([(3.0, math.nan), (1.0, math.nan)]) == 3.0


def test_weights_that_stand_at_an_odd_byte_have_the_same_digest() -> None:
    shifted = torch.arange(65, dtype=torch.uint8)[1:].view(4, 16)
    digests = (fingerprint.digest_tensors([("w", one)]) for one in (shifted, shifted.clone()))
    assert next(digests) == next(digests)


def test_a_layer_without_linear_modules_has_no_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_fed_modules", lambda *_: [])
    sample = SimpleNamespace(k=torch.zeros(2, 1, 8), v=torch.zeros(2, 1, 8))
    evidence: Any = SimpleNamespace(samples=[sample])
    with pytest.raises(search.NoSpec, match="no linear module gives heads of 8"):
        search.find_spec(SimpleNamespace(), evidence)


class Attention(nn.Module):
    """An attention module whose call has keywords."""

    def forward(self, **given: Any) -> None:
        """Nothing: it is looked at."""


def test_keywords_of_a_call_are_learned_by_name() -> None:
    positions, batch = torch.arange(3), SimpleNamespace()
    given = {"positions": positions, "hidden_states": torch.zeros(3, 4), "batch": batch}
    names, _ = learn_call(Attention(), (), given, positions, SimpleNamespace)
    assert names == {"positions": "positions", "hidden": "hidden_states", "batch": "batch"}
    with pytest.raises(UnknownCall, match="takes no hidden states"):
        learn_call(Attention(), (), {"positions": positions}, positions, SimpleNamespace)
