"""``hcache plan`` and ``hcache profile`` as a user calls them; records."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from hcache_backend.cli.main import app
from hcache_backend.config import parse_config
from hcache_backend.plan import measure
from hcache_backend.plan.model_config import read_model
from hcache_backend.plan.model_shape import CLEARLY_LESS, Sides
from hcache_backend.plan.plan import PartitionPlan
from hcache_backend.plan.profile import Rate, preset_profile
from hcache_backend.plan.record import (
    PartitionRecord,
    find_record,
    record_name,
    records,
    save_record,
)
from hcache_backend.store import PageStore
from tests.unit.partition.pipelines import CONFIGS, public_model

RUNNER = CliRunner()

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "torch_dtype": "float32",
}


def hcache(*arguments: object) -> Result:
    return RUNNER.invoke(app, [str(argument) for argument in arguments])


def plan(name: str, hardware: object, *options: object) -> dict[str, Any]:
    model = CONFIGS / f"{name}.json"
    done = hcache("plan", "--model", model, "--hardware", hardware, "--json", *options)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def said(*arguments: object) -> str:
    """What a command says that cannot do its work."""
    done = hcache(*arguments)
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
    return done.stderr


# ---- plan ----


def plain_ms(path: Path | str, hardware: str, *, ssds: int, tokens: int, tp: int = 1) -> float:
    """By hand: SGLang reads all K and V as they are from L3, and then each rank loads its own."""
    path = path if isinstance(path, Path) else CONFIGS / f"{path}.json"
    shape, sides, *_ = read_model(path)
    values = 2 if shape.element_bytes == 4 else shape.element_bytes
    layers = shape.layers - (sides.layers if sides else 0)
    row = layers * shape.kv_width * values + shape.index_bytes
    size = tokens * row + (sides.size if sides else 0)
    of_rank = size if shape.latent else size / tp
    reading = size / (ssds * 6.9e9) if ssds else 0
    return 1e3 * (reading + of_rank / preset_profile(hardware).kv_load.per_second)


LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def llama_70b(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_70B))
    return path


def test_a_plan_is_compared_with_what_sglang_does_alone(llama_70b: Path) -> None:
    given = ("plan", "-m", llama_70b, "-w", "h100", "--ssds", 8, "--tokens", "60K", "--tp", 8)
    found = json.loads(hcache(*given, "--json").stdout)
    times = found["predicted_ms"]
    plain = plain_ms(llama_70b, "h100", ssds=8, tokens=60_000, tp=8)
    assert times["plain"] == pytest.approx(plain) and round(plain) == 402
    shown = hcache(*given).stdout
    fast = {name: f"{times[name] / times['mix']:.1f} times as fast as" for name in times}
    finding = f"{fast['plain']} SGLang's plain pages, {fast['recompute']} computing"
    assert found["finding"] == f"This backend: {finding}" and found["finding"] in shown
    assert fast["plain"].startswith("1.7") and fast["recompute"].startswith("10.3")
    rows = dict(re.findall(r"^(\w.*?) {2,}[\d,]+ +[\d.]+ +([\d.,]+) ", shown, re.M))
    assert rows == {
        "this backend": f"{times['mix']:,.1f}",
        "SGLang's own L3 (plain K and V, read, then loaded)": f"{times['plain']:,.1f}",
        "computed": f"{times['recompute']:,.1f}",
        "hidden states only": f"{times['hidden']:,.1f}",
    }


@pytest.mark.parametrize(
    ("hardware", "cards", "memory"),
    [("h100", 1, 80), ("h100", 2, 0), ("H200", 1, 141), ("rtx4090", 4, 24), ("mi300x", 1, 0)],
)
def test_weights_that_do_not_fit_are_told(
    llama_70b: Path, hardware: str, cards: int, memory: int
) -> None:
    done = hcache("plan", "-m", llama_70b, "-w", hardware, "--tp", cards)
    told = f"- weights about 141 GB on {cards} card(s) of {memory} GB: they do not fit\n"
    assert done.exit_code == 0
    assert (told in done.stdout) is bool(memory) is ("do not fit" in done.stdout)


def test_the_bytes_of_sglangs_pages_are_those_without_our_codec(llama_70b: Path) -> None:
    """Option ``restore`` and ``codec`` of our server change nothing in what SGLang does alone."""
    given = ("plan", "-m", llama_70b, "-w", "h100", "--ssds", 8, "--tp", 8, "--json")
    options = (), ("--codec", "none"), ("--restore", "layerwise"), ("--codec", "exp4")
    found = [json.loads(hcache(*given, *more).stdout) for more in options]
    assert {each["plain_bytes_per_token"] for each in found} == {80 * 4096}
    assert len({each["predicted_ms"]["plain"] for each in found}) == 1
    assert len({each["predicted_ms"]["mix"] for each in found}) == len(options)


@pytest.mark.parametrize("ssds", [0, 8])
def test_ranks_of_sglang_load_whole_latents(ssds: int) -> None:
    found = plan("deepseek-v3", "h100", "--ssds", ssds, "--tp", 8, "--tokens", "60K")
    plain = plain_ms("deepseek-v3", "h100", ssds=ssds, tokens=60_000, tp=8)
    assert found["predicted_ms"]["plain"] == pytest.approx(plain)


def test_latents_and_hits_in_host_memory_are_called_that() -> None:
    given = ("plan", "-m", CONFIGS / "deepseek-v3.json", "-w", "h200", "--tp", 8)
    shown = hcache(*given).stdout
    assert "61 layers loaded as latents\n" in shown and "as KV" not in shown
    assert "hidden states 14,336 (14,336 plain), latents 882 (1,152 plain)\n" in shown
    assert "SGLang's own host memory (plain latents, loaded)" in shown


def test_hits_of_other_lengths_are_told_in_words() -> None:
    options = ("-w", "h100", "--ssds", 1, "--restore", "layerwise")
    shown = hcache("plan", "-m", CONFIGS / "llama-2-7b.json", *options).stdout
    (row,) = re.findall(r"^ +4,096 .*$", shown, re.M)
    assert re.split(" {2,}", row.strip()) == ["4,096", "2", "174.7", "computed instead"]


def test_a_hit_that_is_computed_is_compared_as_such() -> None:
    found = plan("llama-2-7b", "h100", "--ssds", 1, "--tokens", 4096, "--restore", "layerwise")
    times = found["predicted_ms"]
    assert found["refused"]
    assert found["finding"] == (
        "This backend computes such L3 hits (option 'min_gain'): "
        f"{times['plain'] / times['recompute']:.1f} times as fast as SGLang's plain pages, "
        "1.0 times as fast as computing"
    )


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
@pytest.mark.parametrize("hardware", ["h200", "rtx4090"])
def test_every_architecture_is_planned(path: Path, hardware: str) -> None:
    found = plan(path.stem, hardware, "--ssds", 1)
    layers, sizes = found["layers"], found["bytes_per_token_and_layer"]
    stored = found["model"]["layers"] - (found["sides"]["layers"] if found["sides"] else 0)
    assert sum(layers.values()) == stored
    keys = found["model"]["index_bytes"]
    assert found["bytes_per_token"] == (
        layers["hidden"] * sizes["hidden"] + layers["kv"] * sizes["kv"] + keys
    )
    assert found["kv_bytes_per_token"] == stored * sizes["kv"] + keys
    assert found["binds"] in ("compute", "bus", "l3")
    times = found["predicted_ms"]
    assert times["plain"] == pytest.approx(plain_ms(path.stem, hardware, ssds=1, tokens=1024))
    assert CLEARLY_LESS * times["mix"] <= min(times.get("hidden", times["kv"]), times["kv"])
    pays = not any("hidden states do not pay" in note for note in found["notes"])
    assert pays == (layers["hidden"] > 0)
    if found["model"]["attention"] in ("GQA", "MQA", "MLA") and sizes["hidden"] >= sizes["kv"]:
        assert not pays


def test_where_hidden_states_do_not_pay_the_plan_says_so() -> None:
    found = plan("deepseek-v3", "h200", "--tp", 8)
    assert found["l3"] == "none"
    assert found["layers"] == {"recompute": 0, "hidden": 0, "kv": 61}
    (note,) = (note for note in found["notes"] if "do not pay" in note)
    assert "14,336 bytes per token and layer, latents 882 (MLA)" in note
    assert "61 layers loaded as latents" in note
    assert any("served in KV mode" in note for note in found["notes"])


# That these are SGLang's bytes: tests/engine/in_process/pools/test_dsa_bytes.py.
@pytest.mark.parametrize(
    ("name", "gpu", "stored", "row"),
    [("deepseek-v3.2", "h200", 882, 1152), ("glm-5", "rtx5090", 656, 656)],
)
def test_pages_of_dsa_models_have_latents_and_keys(
    name: str, gpu: str, stored: int, row: int
) -> None:
    """In bfloat16 the latents are encoded; the keys, and rows in FP8, are as they are."""
    found = plan(name, gpu, "--tp", 1, "--ssds", 4, "--tokens", "60K")
    layers = found["model"]["layers"]
    assert found["plain_bytes_per_token"] == layers * (row + 132)
    assert found["bytes_per_token"] == layers * (stored + 132)
    read = 60e6 * layers * (stored + 132) / (4 * 6.9e9)
    assert found["busy_ms"]["l3"] == pytest.approx(read) and found["l3"] == "overlapped"
    assert not found["recomputes_front"]
    assert "without the indexer" in " ".join(found["notes"])
    given = ("-m", CONFIGS / "deepseek-v3.json", "-w", gpu, "--kv-cache-dtype", "bfloat16")
    assert "only DSA models are planned with another than auto" in said("plan", *given)


# Layers with pages, and what a hit needs besides.
HYBRIDS = {
    "qwen3-next-80b": (12, {"kind": "state", "layers": 36, "size": 77_266_944}),
    "gpt-oss-120b": (18, {"kind": "window", "layers": 18, "size": 4_718_592}),
}


@pytest.mark.parametrize("restore", ["auto", "layerwise"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hit_of_a_hybrid_model_brings_a_window_or_a_state(
    name: str, tp: int, restore: str
) -> None:
    layers, sides = HYBRIDS[name]
    options = ("--ssds", 1, "--tp", tp, "--tokens", 16384, "--restore", restore)
    found = plan(name, "h100", *options)
    assert found["sides"] == sides
    assert found["layers"] == {"recompute": 0, "hidden": 0, "kv": layers}
    assert set(found["predicted_ms"]) == {"mix", "kv", "recompute", "plain"}
    assert not found["recomputes_front"]
    refused = {length: at["refused"] for length, at in found["at_length"].items()}
    assert refused["1024"] is (sides["kind"] == "state") and not refused["16384"]
    pages = 16384 * found["bytes_per_token"]
    read, copied = (1e3 * size / 6.9e9 for size in (pages, sides["size"]))
    bus = 1e3 / preset_profile("h100").kv_load.per_second / tp
    assert found["busy_ms"]["l3"] == pytest.approx(read + copied)
    assert found["busy_ms"]["bus"] == pytest.approx((pages + sides["size"]) * bus)
    first = pages * bus if restore == "layerwise" else 0.0  # before or while pages are restored
    expected = read + first + copied + sides["size"] * bus
    assert found["predicted_ms"]["mix"] == pytest.approx(expected)
    (note,) = (note for note in found["notes"] if f"a {sides['kind']} of the" in note)
    assert f"{copied:,.1f} ms to read and {sides['size'] * bus:,.1f} ms to copy" in note


def test_layers_with_sides_do_not_attend_to_all_tokens() -> None:
    """Of twice as many tokens the full-attention layers alone have four times as much to do."""
    profile, shape = preset_profile("h100"), public_model("gpt-oss-120b")
    sides = Sides("window", 18, 4_718_592)
    times = [
        PartitionPlan(profile, shape, tokens, 1, "auto", sides).seconds("recompute")
        for tokens in (1 << 14, 1 << 15)
    ]
    pairs = shape.attention_flops * 18 * (1 << 28) / profile.attention.per_second
    assert times[1] - 2 * times[0] == pytest.approx(pairs, rel=0.02)


def test_the_layers_of_a_plan_are_told() -> None:
    model = ("plan", "-m", CONFIGS / "llama-2-13b.json", "-w", "h100", "--tokens", 16384)
    assert "1 layer recomputed, 39 layers from hidden states" in hcache(*model).stdout


# Model, card, ranks -> seconds of each step of a start.
STARTS = {
    ("llama-3-8b", "h100", 1): [0.0, 0.4, 1.4, 6.2, 65.8],
    ("deepseek-v3", "h200", 8): [0.1, 0.6, 1.4, 2.6, 50.4],
    ("llama-2-7b", "a100-40g", 2): [0.0, 0.2, 1.4, 8.7, 34.7],
}


@pytest.mark.parametrize(("name", "card", "tp"), STARTS)
def test_the_steps_of_a_start_are_told(name: str, card: str, tp: int) -> None:
    steps = plan(name, card, "--tp", tp)["start"]
    assert [round(step["seconds"], 1) for step in steps] == STARTS[name, card, tp]
    shown = hcache("plan", "-m", CONFIGS / f"{name}.json", "-w", card, "--tp", tp).stdout
    for step in steps:
        row = rf"^{step['name']} +{step['seconds']:,.1f}  {step['often']} *$"
        assert re.search(row, shown, re.M)


def test_host_memory_of_an_unknown_card_is_100_gb(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    preset_profile("h100").save(path)
    *_, pinned = plan("llama-3-8b", path)["start"]
    assert pinned["name"] == "100 GB pinned" and pinned["seconds"] == pytest.approx(100 / 1.7)


# Model, ranks -> where L3 is in a restore by a server with default options. Where it is read during
# that, front pages are recomputed. (tests/engine/in_process/hits/test_plan.py asks the engine.)
SERVERS = {
    ("llama-2-13b", 1): "overlapped",  # own pages of hidden states
    ("llama-2-13b", 2): "first",  # whose ranks exchange shares
    ("llama-3-8b", 1): "overlapped",  # own pages of K and V
    ("llama-3-8b", 2): "overlapped",
    ("deepseek-v3", 1): "overlapped",  # own pages of latents
    ("deepseek-v3", 8): "first",  # whose ranks exchange shares
}


@pytest.mark.parametrize(("name", "tp"), SERVERS)
def test_the_default_is_what_a_server_with_default_options_does(name: str, tp: int) -> None:
    found = plan(name, "h100", "--ssds", 1, "--tp", tp)
    assert (found["restore"], found["l3"]) == ("auto", SERVERS[name, tp])
    stored = "hidden" if name == "llama-2-13b" else "kv"
    assert found["layers"] == {"recompute": 0, "hidden": 0, "kv": 0} | {
        stored: found["model"]["layers"]
    }
    given = ("-w", "h100", "--ssds", 1, "--tp", tp)
    shown = hcache("plan", "-m", CONFIGS / f"{name}.json", *given).stdout
    told = "overlapped with recomputing the front" in shown
    assert told is found["recomputes_front"] is (found["l3"] == "overlapped")
    times, read = found["predicted_ms"], found["read_only_ms"]
    if found["recomputes_front"]:  # at their two rates together, if L3 brings an eighth
        together = 1 / (1 / read + 1 / times["recompute"])
        read = together if together > read / 8 else read
    assert times["mix"] == times[stored] == pytest.approx(read)


# That the plan and a server decide the same: tests/engine/in_process/hits/test_plan.py.
@pytest.mark.parametrize(
    ("restore", "gb_per_second", "refused"),
    [
        ("layerwise", 6.9, True),
        ("auto", 1.9, False),  # its front is recomputed, L3 brings a part
        ("auto", 1.7, True),  # L3 would bring less than an eighth
    ],
)
def test_hits_that_take_longer_than_computing_them_are_refused(
    restore: str, gb_per_second: float, refused: bool, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    l3 = Rate(per_second=gb_per_second * 1e9)
    preset_profile("h100").model_copy(update={"l3": l3}).save(path)
    options = ("llama-2-7b", path, "--tokens", 4096, "--restore", restore)
    found = plan(*options)
    times = found["predicted_ms"]
    assert found["refused"] is refused is (times["recompute"] <= times["mix"])
    assert found["finding"].startswith("This backend computes such L3 hits") is refused
    assert not plan(*options, "--ssds", 0)["refused"]  # from host memory


# That a server stores these bytes: tests/engine/in_process/hits/test_plan.py.
@pytest.mark.parametrize(
    ("name", "codec", "told"),
    [
        ("llama-3-8b", "auto", "K and V 2,936 (4,096 plain)"),
        ("llama-2-7b", "exp4", "- codec exp4 is not for MHA in float16"),
        ("deepseek-v3", "int8", "- codec int8 is not for MLA in bfloat16"),
        ("glm-5", "int8", "- codec int8 is not for DSA in bfloat16"),
    ],
)
def test_a_codec_that_applies_or_does_not_is_told(name: str, codec: str, told: str) -> None:
    options = ("-w", "h100", "--ssds", 1, "--codec", codec)
    shown = hcache("plan", "-m", CONFIGS / f"{name}.json", *options).stdout
    assert told in shown and ("- codec" in shown) is (codec != "auto")


def test_float32_models_are_served_in_16_bits_on_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    done = hcache("plan", "-m", path, "-w", "h100", "--json")
    found = json.loads(done.stdout)
    assert found["bytes_per_token_and_layer"] == {"hidden": 128, "kv": 256}
    assert any("16 bits" in note for note in found["notes"])


def test_a_profile_of_another_model_is_taken_over_and_said(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile = preset_profile("h100", ssds=2)
    profile.save(path)
    assert plan("llama-2-7b", path)["layers"] == plan("llama-2-7b", "h100", "--ssds", 2)["layers"]
    dram = plan("llama-2-7b", path, "--ssds", 0)
    assert dram["layers"] == plan("llama-2-7b", "h100")["layers"]
    for measured, other in (("llama-2-7b", False), ("llama-2-13b", True)):
        profile.model_copy(update={"model": public_model(measured)}).save(path)
        notes = plan("llama-2-7b", path)["notes"]
        assert any("another shape" in note for note in notes) is other


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llama-2-7b", ("-w", "a100-40"), "the presets are a100-40g, a30, "),
        ("llama-2-7b", ("-w", "abacus"), "make one with `hcache profile`"),
        ("llama-2-7b", ("--tp", 3), "--tp 3: must divide the model's 32"),
        ("gemma-3-12b", ("--tp", 32), "16 attention heads"),
        ("few heads", ("--tp", 3), "4 KV heads, or be a multiple"),
        ("nowhere", (), "cannot read"),
        *(
            ("llama-2-7b", ("--tokens", wrong), f"'--tokens': '{wrong}' must be a whole number")
            for wrong in (0, -5, "1.5", "60KB", "1,5K", "many", "60 bytes")
        ),
        ("llama-2-7b", ("--tp", 0), "--tp"),
        ("llama-2-7b", ("--ssds", -1), "--ssds"),
        ("llama-2-7b", ("--restore", "lazy"), "--restore"),
        ("llama-2-7b", ("-w", "wrong.json"), "field 'device'"),
        ("llama-2-7b", ("-w", "h100.json", "--ssds", 4), "its own measured L3"),
        *(  # are gone
            ("llama-3-8b", (option, 10), f"No such option: {option}")
            for option in ("--users", "--replicas", "--new-tokens", "--turns-per-hour", "--plot")
        ),
    ],
)
def test_bad_input_is_named(
    name: str,
    options: tuple[object, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    few = {**TINY, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 8}
    (tmp_path / "few heads.json").write_text(json.dumps(few))
    (tmp_path / "wrong.json").write_text("{}")
    preset_profile("h100").save(tmp_path / "h100.json")
    model = next(CONFIGS.glob(f"{name}.json"), tmp_path / f"{name}.json")
    assert message in said("plan", "-m", model, "-w", "h100", *options)


@pytest.mark.parametrize(
    ("given", "tokens"),
    [("60K", 60_000), ("3k", 3_000), ("1.5M", 1_500_000), ("16Ki", 16_384), ("60,000", 60_000)],
)
def test_numbers_of_tokens_have_units_and_presets_any_case(given: str, tokens: int) -> None:
    found = plan("llama-3-8b", "H100", "--tokens", given)
    assert found["tokens"] == tokens
    assert found["predicted_ms"] == plan("llama-3-8b", "h100", "--tokens", tokens)["predicted_ms"]


# ---- profile ----


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return path


@pytest.mark.skipif(torch.cuda.is_available(), reason="expects the processor to be measured")
def test_a_measured_profile_is_planned_with(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    pages = tmp_path / "pages"
    done = hcache("profile", "-m", tiny, "-o", out, "-d", pages, "--seconds", "0.02")
    assert done.exit_code == 0, done.output
    assert "attention" in done.stdout
    assert "Each was measured alone" in done.stdout
    assert not pages.exists()
    written = json.loads(out.read_text())
    assert (written["dirs"], written["dtype"]) == ([str(pages)], "float32")
    assert written["date"].startswith("20")
    report = json.loads(hcache("plan", "-m", tiny, "-w", out, "--json").stdout)
    assert report["bytes_per_token_and_layer"] == {"hidden": 256, "kv": 512}
    assert report["hardware"]["source"] == "measured by hcache profile"
    assert not any("another shape" in note for note in report["notes"])


def test_a_device_without_room_is_said(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crowded(*_: object) -> float:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(measure.Bench, "_time", crowded)
    assert "no room for one layer" in said("profile", "-m", tiny, "-d", tmp_path, "--seconds", 0.02)


def test_profile_names_bad_input(tiny: Path, tmp_path: Path) -> None:
    assert "cannot read nowhere" in said("profile", "-m", "nowhere", "-d", tmp_path)
    out = tmp_path / "absent" / "profile.json"
    assert "there is no folder" in said("profile", "-m", tiny, "-d", tmp_path, "-o", out)
    assert "--seconds" in said("profile", "-m", tiny, "--seconds", "0")
    text = tmp_path / "a file"
    text.write_text("")
    assert "a file" in said("profile", "-m", tiny, "-d", text / "pages", "--seconds", "0.02")


SHAPE = public_model("llama-2-7b")
NAME = record_name(b"k" * 16)
METHODS = {"recompute": 0, "hidden": 0, "kv": 32}
RECORD = PartitionRecord(
    model="m", reason="by an option", **METHODS, shape=SHAPE, tokens=4096, tp=1, l3="none"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    config = parse_config({"dirs": [str(folder)], "min_free_bytes": 0}, "test")
    PageStore(config, b"writer-1", background=False).close()
    save_record(folder, NAME, RECORD)
    return folder


PARTITION = "partition of m"


def check_of(folder: Path, subject: str) -> tuple[str, str]:
    """What ``hcache doctor`` says of it."""
    checks = json.loads(hcache("doctor", "-d", folder, "--json").stdout)["checks"]
    [check] = [check for check in checks if check["subject"] == f"{folder}: {subject}"]
    return check["verdict"], check["detail"]


def test_the_first_record_stays_whoever_comes_later(folder: Path) -> None:
    later = RECORD.model_copy(update={"hidden": 32, "kv": 0, "reason": "by another profile"})
    save_record(folder, NAME, later)
    assert find_record([folder.parent / "none", folder], NAME) == RECORD
    assert list(records(folder)) == [RECORD]
    assert {path.name for path in folder.iterdir() if path.name.startswith(".part")} == set()


def test_a_record_that_cannot_be_read_is_none(folder: Path) -> None:
    (folder / NAME).write_text("{")
    assert find_record([folder], NAME) is None
    assert list(records(folder)) == []


def test_doctor_shows_the_partition(folder: Path) -> None:
    assert check_of(folder, PARTITION) == ("good", "32 layers loaded as KV: by an option")


@pytest.mark.parametrize("sides", [False, True])
def test_a_plan_says_how_long_l3_is_busy_with_a_hit(sides: bool) -> None:
    model, other, *_ = read_model(CONFIGS / "qwen3-next-80b.json")
    profile, tokens = preset_profile("h100", ssds=4), 8000
    found = PartitionPlan(profile, model, tokens, 1, "auto", other if sides else None)
    size = tokens * found.bytes_per_token("mix") + (77_266_944 if sides else 0)
    busy = size / (4 * 6.9e9)
    said = f"keeps L3 busy for {1e3 * busy:,.1f} ms, so L3 reads at most {1 / busy:,.1f} of them"
    assert any(said in note for note in found.notes())
    in_memory = replace(found, profile=preset_profile("h100"))
    assert not any("L3 busy" in note for note in in_memory.notes())
