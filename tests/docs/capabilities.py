"""The part of docs/limits.md that is printed from the product's table of capabilities."""

from hcache_backend.start.capabilities import CAPABILITIES

FIRST, LAST = "<!-- capabilities: written by `python -m tests.docs --write` -->", "<!-- end -->"

_NOTHING = "nothing: it follows from the model"
_WITHOUT = "start without the option"
# What a user does about each need that can be met, by what its feature begins with.
REMEDIES = {
    "devices other": "use CUDA for own pages",
    "other ways to draft": "use one of these four, or no drafts",
    "draft layers (MTP) whose": "start without drafts",
    "context-parallel": "use tensor parallelism (`--tp`) instead",
    "decode servers": "nothing: give the prefill servers the L3",
    "`SGLANG_ENABLE_POST": "unset the variable",
    "hybrid models with": "start without what the reason names; for states use `--page-size 64`",
    "quantised KV other": "use `--kv-cache-dtype auto` or `fp8_e4m3`",
    "quantised KV with": "use `--kv-cache-dtype auto` or `fp8_e4m3`",
    "KV pools that": "try another `--attention-backend`",
    "draft layers that": "nothing if K and V are enough; otherwise start without drafts",
    "MLA": _NOTHING,
    "DSA": _NOTHING,
    "index keys": _NOTHING,
    "sliding windows": _NOTHING,
    "drafts in trees": "set both options to 1",
    "data-parallel attention": "start without it if hidden states pay",
    "`--enable-deterministic": _WITHOUT,
    "`--enable-nvidia": _WITHOUT,
    "LoRA": "serve the adapters from another server",
    "`--enable-two-batch": _WITHOUT,
    "M-RoPE": _NOTHING,
    "on CUDA `--enable-torch": "start without them",
    "on CUDA `--cuda-graph": "use `--cuda-graph-backend-prefill breakable`",
    "`recompute: never`": "remove the option",
    "multimodal": _NOTHING,
    "on CUDA attention": "use `--attention-backend triton` with fp8, `fa3` with sliding windows",
    "`--enable-pdmux`": _WITHOUT,
    "row 0": "report it",
    "`restore: layerwise`": "remove the option",
    "pipeline stages": "use tensor parallelism (`--tp`) if the GPUs are in one machine",
    "`--hicache-host-memory-mode": _WITHOUT,
    "hidden states and latents": "set `mode: kv` for K and V; nothing helps with latents",
    "other allocators": "use `--page-size 64`",
    "an allocator": "use a tested version of SGLang",
}


def remedy(feature: str) -> str:
    [found] = [text for start, text in REMEDIES.items() if feature.startswith(start)]
    return found


def table() -> str:
    """A row for each need: the server's feature, the capabilities that it rules out, the reason,
    and what to do."""
    found: dict[tuple[str, str], list[str]] = {}
    for capability, needs in CAPABILITIES.items():
        for need in needs:
            found.setdefault((need.feature, need.reason), []).append(capability)
    rows = ["| a server with | goes without | the log says | do this |", "|---|---|---|---|"]
    for (feature, reason), capabilities in found.items():
        said, do = reason.replace("{}", "..."), remedy(feature)
        rows.append(f"| {feature} | {', '.join(capabilities)} | {said} | {do} |")
    return "\n".join(rows)


def with_table(text: str) -> str:
    """A page with the table as it is now."""
    before, _, rest = text.partition(FIRST)
    _, _, after = rest.partition(LAST)
    return f"{before}{FIRST}\n{table()}\n{LAST}{after}"
