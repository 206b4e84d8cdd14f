"""What each codec of hidden states costs: bytes, error of K and V, and changed tokens.

- bytes per token: page files of a real SGLang server that captured them
- K and V: projected from encoded and decoded hidden states of the same model, against those of
  the exact ones; relative, root mean square, all heads together and the worst head
- identical tokens: conversations whose history comes back from L3 before each reply. A token counts
  as identical if the exact model picks it after the same prompt and the same tokens before it. In
  float32 the exact model is transformers without any cache; exp4 is for bfloat16, where its
  conversations are compared token by token with those of a server with codec none

The model is random: its margins between tokens are smaller than those of a trained one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.demo.codecs import not_restored
from bench.demo.conversations import MethodRun, Script, run_method
from bench.harness.machine import find_machine
from bench.harness.models import TinyLlama
from bench.harness.program import parser
from bench.harness.report import OUT, grouped_bars, markdown, write
from hcache_kernels.codecs import make_codec

CASES = (
    ("none", "float32"),
    ("int8", "float32"),
    ("fp8", "float32"),
    ("none", "bfloat16"),
    ("exp4", "bfloat16"),
)
Row = dict[str, Any]


def main() -> None:
    parsed = parser("bench.codecs", __doc__)
    parsed.add_argument("--conversations", type=int, default=10)
    parsed.add_argument("--turns", type=int, default=3)
    parsed.add_argument("--question-tokens", type=int, default=500)
    parsed.add_argument("--reply-tokens", type=int, default=100)
    parsed.add_argument("--out", type=Path, default=OUT, help="folder for codecs.json and .png")
    options = parsed.parse_args()
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
            runs[codec, dtype] = run_method(
                "hcache-hidden", script, model, machine, folder, lambda step: None, dtype, codec
            )
            if problems := not_restored(codec, runs[codec, dtype]):
                # A comparison of replies whose history was computed again would say nothing.
                raise SystemExit("\n".join(problems))
        rows = measure(runs, script, load(model))
    results = {"device": machine.name, "codecs": rows}
    print(table_lines(results))
    write(options.out, "codecs", results, draw)


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


def table_lines(results: Row) -> str:
    """Bytes, errors and identical tokens by codec."""
    heads = ("codec", "in", "bytes per token", "of exact", "error of K", "of V", "identical tokens")
    rows = [
        (
            f"`{row['codec']}`",
            row["dtype"],
            f"{row['stored_bytes_per_token']:,.0f}",
            row["share_of_exact"],
            f"{row['k_error']:.2%}",
            f"{row['v_error']:.2%}",
            f"{row['identical']} of {row['tokens']} ({row['identical_share']:.1%})",
        )
        for row in results["codecs"]
    ]
    return markdown(heads, rows)


def draw(results: Row) -> Any:
    """Bytes, error of K, and identical tokens of every codec."""
    from matplotlib.figure import Figure

    rows = [
        {**row, "name": f"{row['codec']}, {row['dtype']}"}
        for row in results["codecs"]
        if (row["codec"], row["dtype"]) != ("none", "bfloat16")
    ]
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    for axes, (title, key) in zip(
        figure.subplots(1, 3),
        (
            ("bytes, of exact hidden states", "share_of_exact"),
            ("error of K, relative", "k_error"),
            ("identical greedy tokens", "identical_share"),
        ),
        strict=True,
    ):
        grouped_bars(axes, title, rows, "name", {title: key}, "%.3f")
    return figure


if __name__ == "__main__":
    main()
