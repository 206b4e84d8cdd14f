"""How many values of K and V need more than a 3-bit code for their exponents, and what it costs.

Counted are values outside the window of seven consecutive exponents that holds most: a window for a
unit, for four channels of it, and for each channel. A unit is a run of tokens in a group of heads,
as pages have them. Beside that stand the share of plain bytes that the worst unit needs by ``exp3``
(kernels/codecs/exp3/reference.py) and by ``exp4``, and the units that do not fit.

- models: K and V of all layers, for four texts: source code, prose (the reference of Python),
  other languages, and numbers. Units have all heads, and one. Hidden states have a window per row
- synthetic K: normal values whose channels have scales of their own (lognormal, sigma 1); of which
  1/64 stand out, 50 times; of which 4 are shifted by 100; all of that, also in 20,480 units
- CPU time of both codes in plain torch
- latents of MLA: normalized rows of 512 values with weights by channel, and 64 normal values

--models are fixtures, smollm2, smollm2-mha, or folders. Ends with status 1 if a unit of K and V of
at least 32 tokens does not fit.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from bench.fixtures.models import chosen
from bench.fixtures.text import corpus
from bench.harness.program import Advance, Program, Run, Setting, at_least, steps
from bench.harness.report import COLOURS, Results, Table, picture
from hcache_kernels.codecs import Cut, make_segment_codec
from hcache_kernels.codecs.exp3 import reference as exp3
from hcache_kernels.codecs.exp4 import reference as exp4
from tests.cpu_engine.hcache_cpu_engine import stub_torchvision

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WINDOW, SPAN = 7, 48
TOKENS, WIDTHS, VALUES = (64, 32, 16), (64, 256, 1024), 1 << 20
KINDS = ("scales", "outliers", "offsets", "all")
MANY = 20_480
"""Units of the hardest synthetic case: one in 10,000 may not fit."""
# ruff: noqa: RUF001
LANGUAGES = (
    "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft und "
    "Gewissen begabt und sollen einander im Geiste der Brüderlichkeit begegnen. ",
    "Tous les êtres humains naissent libres et égaux en dignité et en droits. Ils sont doués de "
    "raison et de conscience et doivent agir les uns envers les autres dans un esprit de "
    "fraternité. ",
    "Все люди рождаются свободными и равными в своем достоинстве и правах. Они наделены разумом и "
    "совестью и должны поступать в отношении друг друга в духе братства. ",
    "人人生而自由,在尊严和权利上一律平等。他们赋有理性和良心,并应以兄弟关系的精神相对待。",
    "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。",
    "يولد جميع الناس أحرارًا متساوين في الكرامة والحقوق، وقد وهبوا عقلاً وضميرًا. ",
    "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है। ",
)
"""The first article of the Universal Declaration of Human Rights."""
Row = dict[str, Any]


class Part(NamedTuple):
    """bfloat16 ``[tokens, width]`` of one layer; units take ``width`` of its channels."""

    what: str
    text: str
    width: int
    values: torch.Tensor


def texts() -> dict[str, str]:
    from pydoc_data.topics import topics

    rng = random.Random(0)
    numbers = (
        f"{rng.gauss(0, 10 ** rng.randint(0, 6)):.{rng.randint(0, 5)}f}" for _ in range(4096)
    )
    return {
        "code": "".join(line for file in corpus().held_out for line in file),
        "prose": "\n".join(topics[name] for name in sorted(topics)),
        "languages": 8 * "".join(LANGUAGES),
        "numbers": "\n".join(",".join(line) for line in zip(*[numbers] * 8, strict=True)),
    }


def model_parts(name: str, folder: Path | str, tokens: int, advance: Advance) -> Iterator[Part]:
    """K (after RoPE), V and hidden states of every layer, for the first ``tokens`` of each text."""
    stub_torchvision()
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for kind, text in texts().items():
        advance(f"{name}: {kind}")
        ids = tokenizer(text[: 16 * tokens])["input_ids"][:tokens]
        with torch.no_grad():  # without a cache of its own, a layer keeps its sliding window only
            made = model(
                torch.tensor([ids]), past_key_values=DynamicCache(), output_hidden_states=True
            )
        for states, layer in zip(made.hidden_states, made.past_key_values.layers, strict=False):
            yield Part(f"{name}: hidden states", kind, states.shape[2], states[0])
            for part, found in (("K", layer.keys[0]), ("V", layer.values[0])):
                values = found.transpose(0, 1).flatten(1)
                for width in sorted({found.shape[2], values.shape[1]}):
                    yield Part(f"{name}: {part}", kind, width, values)


def synthetic(kind: str, units: int, tokens: int, width: int, seed: int) -> torch.Tensor:
    """K of a kind of :data:`KINDS`: bfloat16 ``[units, tokens, width]``."""
    source = torch.Generator().manual_seed(seed)
    values = torch.randn(units, tokens, width, generator=source)

    def some_channels(count: int) -> torch.Tensor:
        order = torch.rand(units, width, generator=source).argsort(1)
        return torch.zeros(units, width).scatter_(1, order[:, :count], 1.0)[:, None]

    if kind in ("scales", "all"):
        values *= torch.randn(units, 1, width, generator=source).exp()
    if kind in ("outliers", "all"):
        values *= 1 + 49 * some_channels(width // 64)
    if kind in ("offsets", "all"):
        values += 100 * some_channels(4)
    return values.bfloat16()


def latents(tokens: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(0)
    rows = torch.randn(tokens, 576, generator=source)
    rows[:, :512] *= torch.randn(tokens, 1, generator=source).exp()
    rows[:, :512] /= rows[:, :512].square().mean(1, keepdim=True).sqrt()
    rows[:, :512] *= torch.randn(512, generator=source).exp()
    return rows.bfloat16()


def in_units(values: torch.Tensor, tokens: int, width: int) -> torch.Tensor:
    """Rows as units, ``[units, tokens, width]``; the rows of a last page that is not whole go."""
    whole = len(values) // tokens * tokens
    return (
        values[:whole]
        .view(-1, tokens, values.shape[1] // width, width)
        .transpose(1, 2)
        .flatten(0, 1)
    )


def outside(exponents: torch.Tensor, channels: int) -> torch.Tensor:
    """Values of each unit outside the best windows, one for so many ``channels``."""
    units, tokens, _ = exponents.shape
    rows = (
        exponents.view(units, tokens, -1, channels).transpose(1, 2).reshape(-1, tokens * channels)
    )
    below = (rows.amax(1, keepdim=True) - rows).clamp(max=SPAN - 1)
    at = below + SPAN * torch.arange(len(rows), dtype=torch.int32)[:, None]
    counts = torch.bincount(at.view(-1), minlength=SPAN * len(rows)).view(-1, SPAN)
    up_to = torch.nn.functional.pad(counts.cumsum(1), (1, 0))
    best = (up_to[:, WINDOW:] - up_to[:, :-WINDOW]).amax(1)
    return (tokens * channels - best).view(units, -1).sum(1)


def needed_by_exp3(units: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Exceptions of each unit, and the share of plain bytes that it needs."""
    count, tokens, width = units.shape
    n, form = tokens * width, exp3.form_of(tokens, width)
    exponents = (units.view(torch.int16) >> 7 & 0xFF).to(torch.uint8).numpy()
    offsets = exponents - exp3.lowest_exponents(exponents, form.counted)[:, None]
    out = (offsets >= exp3.WINDOW).reshape(count, n)
    whole = out & (exp3.SHORT[offsets + np.uint8(1)] == exp3.WHOLE).reshape(count, n)
    blocks = np.add.reduceat(out, range(0, n, exp4.BLOCK_VALUES), axis=1, dtype=np.int64)
    used = (blocks + 1 >> 1).sum(1) + whole.sum(1)
    share = (form.size - form.most + used) / (2 * n)
    return torch.from_numpy(out.sum(1)), torch.from_numpy(share)


def needed_by_exp4(units: torch.Tensor) -> torch.Tensor:
    n = units[0].numel()
    codes = exp4.encode_units(units.reshape(len(units), n))[0][:, n : n + n // 2]
    most = (codes & 0xF == 0).sum(1) + (codes >> 4 == 0).sum(1)
    return (n * 3 // 2 + exp4.form_of(n).tail - exp4.form_of(n).most + most) / (2 * n)


def counted(what: str, units: torch.Tensor, *, windows: bool = True) -> Row:
    """A row of results of bfloat16 ``[units, tokens, width]``."""
    count, tokens, width = units.shape
    exponents = (units.view(torch.int16) >> 7 & 0xFF).int()
    row: Row = {"what": what, "tokens": tokens, "units": count, "unfit": 0}
    row["worst_exp4"] = needed_by_exp4(units).max().item()
    channels = {"four": 4, "channel": 1} if windows and tokens > 1 else {}
    for name, each in channels.items():
        row[name] = outside(exponents, each).double().mean().item() / (tokens * width)
    if windows:
        row |= _shares("unit", outside(exponents, width), tokens * width)
    if tokens > 1:
        found, shares = needed_by_exp3(units)
        given = exp3.form_of(tokens, width).size / (2 * tokens * width)
        row |= {"worst_exp3": shares.max().item(), "given_exp3": given}
        row |= _shares("exp3", found, tokens * width) | {"unfit": int((shares > given).sum())}
    return row


def _shares(name: str, found: torch.Tensor, values: int) -> Row:
    share = found.double() / values
    spread = {"p99": share.quantile(0.99).item(), "most": share.max().item()}
    return {name: share.mean().item(), **{f"{name}_{at}": value for at, value in spread.items()}}


def merged(rows: Sequence[Row]) -> list[Row]:
    """A row for each kind of values and number of tokens: the largest of all texts and widths."""
    groups: dict[tuple[str, int], Row] = {}
    for row in rows:
        found = groups.setdefault((row["what"], row["tokens"]), {"units": 0, "unfit": 0})
        sums = {name: found[name] + row[name] for name in ("units", "unfit")}
        largest = {n: max(found.get(n, v), v) for n, v in row.items() if isinstance(v, float)}
        rounded = {name: round(value, 6) for name, value in largest.items()}
        found |= {"what": row["what"], "tokens": row["tokens"]} | rounded | sums
    return list(groups.values())


def cpu_seconds() -> list[Row]:
    """CPU time of both codes in plain torch, for a GB of K and V in units of 64 tokens: one thread,
    the least of 20 turns."""
    rows: list[Row] = []
    torch.set_num_threads(1)
    for cut in (Cut(1024, 64), Cut(128, 64, groups=8), Cut(64, 64)):
        row, items = cut.groups * cut.width, torch.arange((1 << 22) // (cut.units * cut.values))
        values = [synthetic("scales", 1, cut.tokens * len(items), row, seed) for seed in (1, 2)]
        planes = [each.view(-1, row // 64, 64) for each in values]
        jobs: dict[str, Callable[[], object]] = {}
        for name in ("exp4", "exp3"):
            codec = make_segment_codec(name, cut, 64, torch.bfloat16)
            encoded, fits = codec.encode_reference(planes, items)
            assert fits.all()
            jobs[f"{name}_encode"] = partial(codec.encode_reference, planes, items)
            jobs[f"{name}_decode"] = partial(codec.decode_reference, encoded, planes, items)
        least = dict.fromkeys(jobs, float("inf"))
        for _, (what, job) in product(range(20), jobs.items()):
            begin = time.process_time()
            job()
            least[what] = min(least[what], time.process_time() - begin)
        gigabytes = sum(plane.nbytes for plane in planes) / 1e9
        found = {what: round(seconds / gigabytes, 3) for what, seconds in least.items()}
        rows.append({"units": f"{cut.groups} of 64 x {cut.width}", **found})
    return rows


def measure(run: Run) -> Results:
    cpu, given, rows = cpu_seconds(), run.given, []
    models = [chosen(name, quick=given.quick) for name in given.models]
    for tokens in TOKENS:
        for width in WIDTHS:
            for seed, kind in enumerate(KINDS):
                units = synthetic(kind, VALUES // (tokens * width), tokens, width, seed)
                rows.append(counted(f"K: {kind}", units))
        rows.append(counted("latents", in_units(latents(2048), tokens, 576)))
    many = (synthetic("all", 2048, 64, 64, seed) for seed in range(100, 100 + MANY // 2048))
    rows.append(counted("K: all, many units", torch.cat(list(many)), windows=False))
    with steps(4 * len(models)) as advance:
        for model in models:
            layers: dict[tuple[str, str, int], list[torch.Tensor]] = {}
            for what, text, width, values in model_parts(
                model.name, model.path, given.tokens, advance
            ):
                layers.setdefault((what, text, width), []).append(values)
            for (what, _, width), parts in layers.items():
                for tokens in (1,) if "hidden" in what else TOKENS:
                    units = torch.cat([in_units(each, tokens, width) for each in parts])
                    rows.append(counted(what, units))
    return {
        "models": [model.name for model in models],
        "tokens": given.tokens,
        "rows": merged(rows),
        "cpu": cpu,
    }


def of_tokens(results: Results, tokens: int) -> list[Row]:
    return [row for row in results["rows"] if row["tokens"] == tokens]


def finding(results: Results) -> str:
    rows = of_tokens(results, 64)
    unfit, units = (sum(row[name] for row in rows) for name in ("unfit", "units"))
    most = max(row["worst_exp3"] for row in rows)
    given = max(row["given_exp3"] for row in rows)
    return (
        f"{units - unfit:,} of {units:,} units of 64 tokens fit into {given:.3f} of their bytes by "
        f"exp3; the worst one needs {most:.3f}"
    )


def draw(results: Results) -> Figure:
    """The share of plain bytes that the worst unit of 64 tokens needs, by what was counted."""
    figure, rows = picture(finding(results), 5.0), of_tokens(results, 64)
    axes, names = figure.subplots(), [row["what"] for row in rows]
    for code in ("exp3", "exp4"):
        axes.scatter([row[f"worst_{code}"] for row in rows], names, color=COLOURS[code], label=code)
    given = max(row["given_exp3"] for row in rows)
    axes.axvline(given, color=COLOURS["exp3"], linestyle=":", label="that exp3 gives each unit")
    axes.invert_yaxis()
    axes.grid(visible=True, alpha=0.3)
    axes.set_xlabel("bytes that the worst unit needs, of plain bytes", fontsize=10)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _table(tokens: int) -> Table:
    return Table(
        partial(of_tokens, tokens=tokens),
        f"units of {tokens} tokens = what | units = units :, | window per unit = unit :.2%"
        " | per 4 channels = four :.2% | per channel = channel :.2%"
        " | `exp3` = exp3 :.2% | 99% of units = exp3_p99 :.2% | at most = exp3_most :.2%"
        " | bytes needed = worst_exp3 :.3f | given = given_exp3 :.3f | not fitting = unfit"
        " | needed by `exp4` = worst_exp4 :.3f",
    )


PROGRAM = Program(
    name="exponents",
    doc=__doc__,
    measure=measure,
    serves=False,
    settings=(
        Setting("--models", lambda text: text.split(","), [], "names with commas between them"),
        Setting("--quick", None, False, "fixtures that are trained in a minute"),
        Setting("--tokens", at_least(64), 2048, "of each text"),
    ),
    tables=(
        *(_table(tokens) for tokens in TOKENS),
        Table(
            lambda results: of_tokens(results, 1),
            "rows of hidden states = what | rows = units :, | window per row = unit :.2%"
            " | 99% of rows = unit_p99 :.2% | at most = unit_most :.2%"
            " | needed by `exp4` = worst_exp4 :.3f",
        ),
        Table(
            "cpu",
            "CPU seconds per GB, units of a page = units | `exp4` encodes = exp4_encode :.2f"
            " | `exp3` encodes = exp3_encode :.2f | `exp4` decodes = exp4_decode :.2f"
            " | `exp3` decodes = exp3_decode :.2f",
        ),
    ),
    draw=draw,
    wrong=lambda results: [
        f"{row['what']}: {row['unfit']} units of {row['tokens']} tokens do not fit"
        for row in results["rows"]
        if row.get("unfit") and row["tokens"] >= 32
    ],
)

if __name__ == "__main__":
    PROGRAM.run()
