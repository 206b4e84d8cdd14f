"""What each codec of hidden states costs: bytes, error of K and V, and changed tokens.

    python bench/codecs.py [--conversations 10 --turns 3 --reply-tokens 100]

- bytes a token: page files of a real SGLang server that captured them
- K and V: projected from encoded and decoded hidden states of the same model, against those of
  the exact ones; relative, root mean square, all heads together and the worst head
- identical tokens: conversations whose history comes back from L3 before each reply. A token counts
  as identical if the exact model picks it after the same prompt and the same tokens before it. In
  float32 the exact model is transformers without any cache; exp4 is for bfloat16, where its
  conversations are compared token by token with those of a server with codec none

The model is random: its margins between tokens are smaller than those of a trained one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.demo.conversations import MethodRun, Script, run_method
from bench.harness.machine import find_machine
from bench.harness.methods import PAGE_SIZE
from bench.harness.models import TinyLlama
from hcache_kernels.codecs import make_codec

RESULTS = Path(__file__).parent / "results"
CASES = (
    ("none", "float32"),
    ("int8", "float32"),
    ("fp8", "float32"),
    ("none", "bfloat16"),
    ("exp4", "bfloat16"),
)
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=10)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--question-tokens", type=int, default=500)
    parser.add_argument("--reply-tokens", type=int, default=100)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    script = Script(
        options.conversations, options.turns, options.question_tokens, options.reply_tokens
    )
    machine = find_machine()
    with tempfile.TemporaryDirectory(prefix="hcache-bench-") as scratch:
        model = TinyLlama(vocabulary=script.vocabulary).build(Path(scratch))
        runs = {}
        for codec, dtype in CASES:
            print(f"codec {codec}, {dtype}: serving", flush=True)
            folder = Path(scratch) / f"{codec}-{dtype}"
            folder.mkdir()
            runs[codec, dtype] = run_method(
                "hcache-hidden", script, model, machine, folder, lambda step: None, dtype, codec
            )
            require_restored(runs[codec, dtype], codec)
        rows = measure(runs, script, load(model))
    report(rows, machine.name, options.results)


def require_restored(run: MethodRun, codec: str) -> None:
    """A comparison of replies whose history was computed again would say nothing."""
    if f"codec {codec}" not in run.note:
        raise SystemExit(f"codec {codec}: the server says {run.note!r}")
    for turn in run.turns:
        if turn.turn and turn.l3_tokens < turn.history_tokens - PAGE_SIZE:
            raise SystemExit(
                f"codec {codec}: {turn.l3_tokens} of {turn.history_tokens} tokens came from L3"
            )


def load(model: Path) -> Any:
    """The model in transformers, float32."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def measure(runs: dict[tuple[str, str], MethodRun], script: Script, net: Any) -> list[Row]:
    """One row a codec."""
    exact_bytes = {
        dtype: run.stored_bytes / run.stored_tokens
        for (codec, dtype), run in runs.items()
        if codec == "none"
    }
    hidden = hidden_states(net, prompts_of(script, runs["none", "float32"])[-1][0])
    rows = []
    for (codec, dtype), run in runs.items():
        if dtype == "float32":
            same = teacher_forced(net, prompts_of(script, run))
        else:
            same = side_by_side(run, runs["none", dtype])
        stored = run.stored_bytes / run.stored_tokens
        rows.append(
            {
                "codec": codec,
                "dtype": dtype,
                "stored_bytes_per_token": stored,
                "share_of_exact": stored / exact_bytes[dtype],
                **kv_errors(net, hidden, codec, getattr(torch, dtype)),
                "tokens": len(same),
                "identical": sum(same),
                "identical_share": sum(same) / len(same),
            }
        )
    return rows


def prompts_of(script: Script, run: MethodRun) -> list[tuple[list[int], list[int]]]:
    """Prompt and reply of every turn whose history was restored."""
    histories: dict[int, list[int]] = {}
    pairs = []
    for turn in run.turns:
        history = histories.get(turn.conversation, [])
        prompt = [*history, *script.question(turn.conversation, turn.turn)]
        reply = list(turn.output_ids)
        if history:
            pairs.append((prompt, reply))
        histories[turn.conversation] = prompt + reply
    return pairs


@torch.inference_mode()
def teacher_forced(net: Any, pairs: Sequence[tuple[list[int], list[int]]]) -> list[bool]:
    """For each token of the replies, whether the exact model picks it in its place."""
    same = []
    for prompt, reply in pairs:
        ids = torch.tensor([prompt + reply[:-1]])
        best = net(input_ids=ids, logits_to_keep=len(reply)).logits[0].argmax(-1)
        same += (best == torch.tensor(reply)).tolist()
    return same


def side_by_side(run: MethodRun, exact: MethodRun) -> list[bool]:
    """For each token of the replies after a restore, whether the exact run has the same."""
    return [
        got == want
        for turn, reference in zip(run.turns, exact.turns, strict=True)
        if turn.turn
        for got, want in zip(turn.output_ids, reference.output_ids, strict=True)
    ]


@torch.inference_mode()
def hidden_states(net: Any, ids: list[int]) -> list[torch.Tensor]:
    """What the projections of every layer receive for ``ids``, ``[n, hidden]``."""
    seen: list[torch.Tensor] = []
    handles = [
        layer.self_attn.k_proj.register_forward_pre_hook(
            lambda module, args: seen.append(args[0][0].clone())
        )
        for layer in net.model.layers
    ]
    net(input_ids=torch.tensor([ids]), logits_to_keep=1)
    for handle in handles:
        handle.remove()
    return seen


@torch.inference_mode()
def kv_errors(net: Any, hidden: list[torch.Tensor], codec: str, dtype: torch.dtype) -> Row:
    """Relative errors of K and V that the codec alone makes (RoPE turns, and changes no length)."""
    heads: dict[str, list[torch.Tensor]] = {"k": [], "v": []}
    for layer, states in zip(net.model.layers, hidden, strict=True):
        exact = states.to(dtype)
        encoder = make_codec(codec, exact.shape[1], dtype)
        encoded, ok = encoder.encode(exact)
        assert ok.all(), f"{codec} cannot hold {int((~ok).sum())} rows"
        decoded = encoder.decode(encoded)
        attention = layer.self_attn
        for name, linear in (("k", attention.k_proj), ("v", attention.v_proj)):
            want, got = (linear(rows.float()) for rows in (exact, decoded))
            want, got = (x.unflatten(1, (-1, attention.head_dim)) for x in (want, got))
            square = (got - want).square().mean((0, 2)) / want.square().mean((0, 2))
            heads[name].append(square.sqrt())
    return {
        f"{name}_error{which}": float(function(torch.cat(heads[name])))
        for name in ("k", "v")
        for which, function in (("", torch.mean), ("_worst_head", torch.max))
    }


def report(rows: list[Row], device: str, folder: Path) -> None:
    """Print a table; write codecs.json and codecs.png."""
    print(
        "\n| codec | in | bytes a token | of exact | error of K | of V | identical tokens |\n"
        "|---|---|---|---|---|---|---|"
    )
    for row in rows:
        print(
            f"| `{row['codec']}` | {row['dtype']} | {row['stored_bytes_per_token']:,.0f} | "
            f"{row['share_of_exact']:.2f} | {row['k_error']:.2%} | {row['v_error']:.2%} | "
            f"{row['identical']} of {row['tokens']} ({row['identical_share']:.1%}) |"
        )
    folder.mkdir(parents=True, exist_ok=True)
    content = {"device": device, "codecs": rows}
    (folder / "codecs.json").write_text(json.dumps(content, indent=1) + "\n")
    draw(rows, folder / "codecs.png")


def draw(rows: list[Row], path: Path) -> None:
    """Bytes, error of K and V, and identical tokens of every codec."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    shown = [row for row in rows if (row["codec"], row["dtype"]) != ("none", "bfloat16")]
    names = [f"{row['codec']}\n{row['dtype']}" for row in shown]
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    panels = (
        ("bytes, of exact hidden states", [row["share_of_exact"] for row in shown], "{:.2f}"),
        ("error of K, %", [100 * row["k_error"] for row in shown], "{:.1f}"),
        ("identical greedy tokens, %", [100 * row["identical_share"] for row in shown], "{:.1f}"),
    )
    for axes, (title, values, form) in zip(figure.subplots(1, 3), panels, strict=True):
        bars = axes.bar(names, values, color="#2a7ab9", width=0.6)
        axes.bar_label(bars, labels=[form.format(value) for value in values], padding=3)
        axes.set_title(title, fontsize=10)
        axes.margins(y=0.15)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
