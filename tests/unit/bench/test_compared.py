"""How programs compare methods: round by round, with an interval."""

import json
import random
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import real, replies
from bench.harness.machine import Machine
from bench.harness.rounds import median_interval
from bench.harness.server import Reply, ServerError
from bench.hits import cases, load, measure
from bench.hits.cases import ALWAYS, MODELS, OURS
from bench.record import RESULTS
from hcache_backend.server_report import ServerReport, write_report


def test_hits_are_compared_with_the_better_choice_round_by_round() -> None:
    none, always = [1.0, 2.0, 1.0, 2.0, 1.0, 2.0], [3.0] * 6
    found = measure.compared([each + 0.15 for each in none], none, always)
    assert found["of_better"] == pytest.approx(1.1)
    assert found["interval"] == pytest.approx([1.1, 1.1])
    few = measure.compared([1.0], [2.0], [4.0])
    assert few == {"of_better": 0.5, "interval": None}


def test_bursts_are_compared_one_by_one() -> None:
    rates = {"none": [0.9, 1.0], "always": [0.5, 0.8], "ours": [1.08, 1.1]}
    waits = {"none": [2.0, 4.0], "always": [8.0, 5.0], "ours": [1.0, 4.4]}
    found = load.compared(rates, waits)
    assert found["goodput_of_better"] == pytest.approx((1.2 + 1.1) / 2)
    assert found["wait_of_better"] == pytest.approx((0.5 + 1.1) / 2)


def test_cold_and_warm_answers_are_compared_round_by_round() -> None:
    """The machine gets slower from round to round."""
    ask = partial(real.Ask, cpu_s=1.0, share=1.0, reply=(1,))
    factors = {"ours": (0.6, 0.9), "file": (1.0, 0.5), "none": (5.0, 5.0)}
    found = {
        name: [(ask(cold * n), ask(warm * n)) for n in range(1, 8)]
        for name, (cold, warm) in factors.items()
    }
    parts = real.ratios(found)
    assert parts["of_file_cold_interval"] == pytest.approx((0.6, 0.6))
    assert parts["of_file_warm"] == pytest.approx(1.8)
    assert real.ratios({"ours": found["ours"]}) == {}


def test_a_case_that_fails_is_named_and_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "real.json"
    row = json.loads((RESULTS / "real.json").read_text())["rows"][0]
    row.pop("date", None)
    written: list[list[int]] = []

    def measured(run: object, case: real.Case, *_: object) -> real.Row:
        if out.exists():
            written.append([row["tokens"] for row in json.loads(out.read_text())["rows"]])
        if case[-1] > 2048:
            raise ServerError("SGLang server: killed\nits log")
        return {**row, **dict(zip(("form", "dtype", "tokens"), case, strict=True))}

    monkeypatch.setattr(real, "measured", measured)
    machine = Machine("cpu", "a processor", "0.0.0")
    monkeypatch.setattr("bench.harness.machine.find_machine", lambda: machine)
    few = ["--forms", "smollm2", "--dtypes", "float32", "--out", str(tmp_path)]
    assert real.PROGRAM.main([*few, "--tokens", "1024", "4100", "2048"]) == 1
    why = "not measured: smollm2, float32, 4,096 tokens: SGLang server: killed"
    assert why in capsys.readouterr().err.splitlines()
    found = json.loads(out.read_text())
    assert found["failed"] == {"smollm2, float32, 4,096 tokens": "SGLang server: killed"}
    assert written == [[1024], [1024]]
    # Rows of earlier results stay, with their date; those that are measured anew do not.
    assert real.PROGRAM.main([*few, "--tokens", "512", "2048", "--keep", str(out)]) == 0
    again = json.loads(out.read_text())
    assert "failed" not in again
    dates = {row["tokens"]: row.get("date") for row in again["rows"]}
    assert dates == {512: None, 1024: found["date"], 2048: None}
    with pytest.raises(SystemExit, match="2"):  # nothing was measured: the file stays
        real.PROGRAM.main([*few, "--tokens", "4096"])
    assert why in capsys.readouterr().err and json.loads(out.read_text()) == again


def test_replies_are_compared_up_to_the_first_token_that_differs() -> None:
    def reply(tokens: list[int], best: list[float]) -> Reply:
        tops = [[[logprob, 0, None], [logprob - 0.25, 1, None]] for logprob in best]
        return Reply(tokens, {"output_top_logprobs": tops})

    computed = reply([1, 2, 3], [-1.0, -2.0, -3.0])
    others = [reply([1, 2, 3], [-1.0, -2.0, -3.0]), reply([1, 9, 3], [-1.5, -7.0, -9.0])]
    found = replies.compared(others, [computed, computed])
    assert found == {"differ": 1, "ties": [0.25], "mean": 0.125, "largest": 0.5}
    assert replies.compared(others[1:], [reply([4, 2, 3], [0.0] * 3)]) == {
        "differ": 1,
        "ties": [0.25],
    }


@pytest.mark.parametrize(("count", "first"), [(6, 1), (8, 1), (9, 2), (15, 4), (25, 8)])
def test_the_ends_of_the_interval_are_those_of_the_sign_test(count: int, first: int) -> None:
    values = list(range(1, count + 1))
    random.Random(0).shuffle(values)
    assert median_interval(values) == (first, count + 1 - first)
    assert median_interval(values[:5]) is None


@pytest.mark.parametrize("codec", ["exp4", "none", None])
def test_nothing_is_measured_whose_pages_are_in_another_codec(
    codec: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: Any, dtype: str, **_options: Any) -> Any:
        server = SimpleNamespace(l3=tmp_path, server=SimpleNamespace(error=ServerError))
        return nullcontext(SimpleNamespace(servers={ALWAYS: server, OURS: server}, dtype=dtype))

    monkeypatch.setattr(cases, "taking_turns", started)
    if codec is not None:
        report = {"time": 0.0, "model": "m", "mode": "kv", "pages": "own", "reason": None}
        write_report(tmp_path, ServerReport(**report, codec=codec, projection=()))
    model = replace(MODELS["MHA-bf16"], build=lambda *_: tmp_path)
    wrong = pytest.raises(ServerError, match=f"by codec {codec or 'unknown'}, not by exp4")
    with nullcontext() if codec == "exp4" else wrong, model.turns(None, tmp_path, 256) as turns:  # type: ignore[arg-type]
        assert turns.dtype == "bfloat16"  # type: ignore[attr-defined]
