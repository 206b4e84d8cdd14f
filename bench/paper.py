"""The paper's Table 3 and figures 11 and 12 in the simulated pipeline, beside its numbers.

Everything follows from the presets of ``hcache plan`` and the cost model, with one compute share
and one bus share for all, so it takes seconds and no GPU. docs/paper.md has the reasons for
differences from the paper. The numbers of its figures are those of its text: bars are pictures.

``contention`` has the platforms of figure 11 with copies that take multiprocessors of projections:
a few, as the product's do, or all of them, so that copies and projections add up.
"""

import math
from dataclasses import asdict
from typing import Any, NamedTuple

from bench.harness.program import Program
from bench.harness.report import Picture, Series, Table
from hcache_backend.plan.model_shape import ModelShape
from hcache_backend.plan.profile import COMPUTE_SHARE, PRESETS, Profile, Rate, preset_profile
from hcache_backend.plan.restore import (
    LAYER_METHODS,
    LayerCosts,
    Partition,
    Restore,
    search,
    simulate,
)
from hcache_kernels.launch import COPY_PROGRAMS

Row = dict[str, Any]
Results = dict[str, list[Row]]
TOKENS = 1024  # history of the paper's experiments, if it says how long it is (6.2.2, 6.3.2)


def mha(family: str, layers: int, heads: int, mlp_width: int, *, gated: bool) -> ModelShape:
    return ModelShape(
        family=family,
        gated=gated,
        layers=layers,
        hidden=128 * heads,
        heads=heads,
        kv_heads=heads,
        head_dim=128,
        value_dim=128,
        mlp_width=mlp_width,
    )


MODELS = {
    "Llama-2-7B": mha("llama", 32, 32, 11008, gated=True),
    "Llama-2-13B": mha("llama", 40, 40, 13824, gated=True),
    "OPT-30B": mha("opt", 48, 56, 28672, gated=False),
}


class Planned(NamedTuple):
    """The paper's plan: recomputed layers are not stored, and L3 is read during the restore.

    ``partition`` is the fastest mix of all three methods.
    """

    profile: Profile
    model: ModelShape
    costs: LayerCosts
    partition: Partition


class Setting(NamedTuple):
    """A restore on a machine.

    Attributes:
        model: A key of :data:`MODELS`.
        preset: A key of the presets.
        ssds: SSDs that L3 is striped over; 0: host memory.
        tp: Tensor-parallel ranks.
        compute_share: Share of the peak FLOP/s that is reached.
    """

    model: str
    preset: str = "a100-40g"
    ssds: int = 0
    tp: int = 1
    compute_share: float = COMPUTE_SHARE

    def __str__(self) -> str:
        device = PRESETS[self.preset].name + (f" x {self.tp}" if self.tp > 1 else "")
        storage = f"{self.ssds} SSD{'s' if self.ssds > 1 else ''}" if self.ssds else "DRAM"
        return f"{self.model}, {device}, {storage}"

    def plan(self) -> Planned:
        """The paper's plan for it."""
        profile = preset_profile(self.preset, self.ssds)
        rate = Rate(per_second=self.compute_share * PRESETS[self.preset].flops)
        rates = dict.fromkeys(("projection", "dense", "attention"), rate)
        profile = profile.model_copy(update=rates)
        model = MODELS[self.model]
        restore = Restore(profile, model, Partition(0, 0, model.layers), self.tp, paper=True)
        partition = restore.fastest(TOKENS, "overlapped", LAYER_METHODS)
        return Planned(profile, model, restore.costs(TOKENS, 0, "overlapped"), partition)


ONE_SSD = Setting("Llama-2-13B", ssds=1)
A30 = Setting("Llama-2-7B", "a30")
TABLE_3 = (
    (Setting("Llama-2-7B", ssds=4), Partition(0, 31, 1), 256 / 132),
    (Setting("Llama-2-13B", ssds=4), Partition(0, 36, 4), 400 / 210),
    (Setting("OPT-30B", ssds=4, tp=4), Partition(8, 40, 0), 672 / 280),
    (ONE_SSD, Partition(9, 31, 0), None),
)
"""The paper's schedules, and bytes of KV over bytes that they store (6.1.3, 6.3.2)."""
FIGURE_11 = {
    "platforms": (  # those that hold the weights; the text does not say which model ran on which
        *(Setting("Llama-2-7B", name) for name in ("a100-40g", "a30", "rtx4090", "l20", "h800")),
        *(Setting("Llama-2-13B", name) for name in ("a100-40g", "l20", "h800")),
        *(Setting("OPT-30B", "a100-40g", tp=4), Setting("OPT-30B", "h800")),
    ),
    "SSDs": (
        *(Setting(f"Llama-2-{size}", ssds=n) for size in ("7B", "13B") for n in (1, 2, 3, 4)),
        *(Setting("OPT-30B", ssds=n, tp=4) for n in (4, 8, 12, 16)),
    ),
}
POINTS = {A30: 1.33, Setting("Llama-2-13B"): 1.66, Setting("Llama-2-13B", "h800"): 1.77}
"""HCache over KV offload, if section 6.2.1 names model and platform."""
FIGURE_12 = (
    # The text of 6.3.1 does not name them: one SSD is its slow I/O, an A30 its low computation.
    ("compute-sufficient", Setting("Llama-2-7B", ssds=1)),
    ("compute-sufficient", ONE_SSD),
    ("balanced", Setting("Llama-2-7B", ssds=4)),
    ("balanced", Setting("Llama-2-13B", ssds=4)),
    ("IO-sufficient", A30),
)
MOST_OVER_RECOMPUTE = 9.05
RANGES = {
    ("platforms", "over_kv"): ("Figure 11, platforms: than K and V", 1.33, 1.81),
    ("platforms", "over_recompute"): (
        *("Figure 11, platforms: than recomputation", 5.04, MOST_OVER_RECOMPUTE),
    ),
    ("SSDs", "over_kv"): ("Figure 11, SSDs: than K and V", 1.7, 2.66),
    ("SSDs", "over_recompute"): ("Figure 11, SSDs: than recomputation", 2.3, 6.1),
    ("skewed", "over_hidden"): ("Figure 12, not balanced: than hidden states only", 1.35, 1.64),
    ("ablations", "over_hybrid"): ("Figure 12: than the naive hybrid", 1.28, 1.42),
    ("skewed", "over_kv"): ("Figure 12, not balanced: than K and V", 1.45, 2.66),
}
"""Smallest and largest ratio that the text says figures 11 and 12 show (6.2.1, 6.2.2, 6.3.1)."""
PROCESSORS = {"a100-40g": 108, "a30": 56, "rtx4090": 128, "l20": 92, "h800": 132}
"""Multiprocessors (data sheets)."""


def compute() -> Results:
    found = {name: [restore(each) for each in settings] for name, settings in FIGURE_11.items()}
    found["ablations"] = [{"kind": kind, **restore(setting)} for kind, setting in FIGURE_12]
    rows = found | {"skewed": [r for r in found["ablations"] if r["kind"] != "balanced"]}
    found["ranges"] = []
    for (figure, ratio), (_, *paper) in RANGES.items():
        ours = [row[ratio] for row in rows[figure]]
        one = {"figure": figure, "ratio": ratio, "paper": paper, "ours": (min(ours), max(ours))}
        found["ranges"].append(one)
    found["contention"] = [contention(each) for each in FIGURE_11["platforms"]]
    found["implied"] = [implied(setting, over_kv) for setting, over_kv in POINTS.items()]
    found["table_3"] = [schedules(*case) for case in TABLE_3]
    return found


def restore(setting: Setting) -> Row:
    """Milliseconds of a restore by the partition, by its ablations and by the pure methods."""
    plan = setting.plan()
    layers = plan.model.layers
    choices = {
        "mix": plan.partition,
        "hidden": Partition(0, layers, 0),
        "kv": Partition(0, 0, layers),
        "recompute": Partition(layers, 0, 0),
        "hybrid": search(plan.costs, layers, methods=("recompute", "kv")),
    }
    ms = {name: 1e3 * simulate(plan.costs, choice) for name, choice in choices.items()}
    return {
        "setting": str(setting),
        "paper": POINTS.get(setting),
        **{f"{name}_ms": took for name, took in ms.items()},
        **{f"over_{name}": took / ms["mix"] for name, took in ms.items() if name != "mix"},
    }


def contention(setting: Setting) -> Row:
    """A restore whose copies leave all multiprocessors, most or none of them to projections.

    The bus is as fast each time. A multiprocessor with a program of a copy is counted as lost to
    computation as long as there are copies.
    """
    plan, layers = setting.plan(), setting.plan().model.layers
    programs = min(COPY_PROGRAMS, PROCESSORS[setting.preset] // 4)
    left = 1 - programs / PROCESSORS[setting.preset]
    beside = plan.costs._replace(c_h=plan.costs.c_h / left).slower_recomputation(1 / left)

    def added(costs: LayerCosts, partition: Partition) -> float:
        return costs.reading(partition) + costs.transfer(partition) + costs.compute(partition)

    kv = simulate(plan.costs, Partition(0, 0, layers))
    took = {
        "ideal": simulate(plan.costs, plan.partition),
        "few_programs": simulate(beside, search(beside, layers)),
        "added_up": added(plan.costs, search(plan.costs, layers, added)),
    }
    return {
        "setting": str(setting),
        "programs": programs,
        "multiprocessors_left": left,
        **{f"{name}_ms": 1e3 * seconds for name, seconds in took.items()},
        **{f"{name}_over_kv": kv / seconds for name, seconds in took.items()},
        "added_up_hidden_only_over_kv": kv / added(plan.costs, Partition(0, layers, 0)),
    }


def closed_form(costs: LayerCosts, layers: int) -> Partition | None:
    """The paper's solution of :meth:`LayerCosts.least` for two methods (section 4.1.2).

    Hidden states with KV if the projection is the slower part, otherwise with recomputation;
    rounded up as in the paper. None if it does not apply: hidden states that take as long to
    transfer as KV, or as long to project as to recompute; L3 outside the pipeline; a last
    recomputed layer that ends early.
    """
    io_h, io_kv, c_h, c_tok, l3_h, l3_kv, c_tok_last = costs
    if io_h >= io_kv or c_h >= c_tok or l3_h or l3_kv or c_tok_last is not None:
        return None
    if c_h > io_h:
        hidden = math.ceil(layers * io_kv / (io_kv + c_h - io_h))
        return Partition(0, hidden, layers - hidden)
    hidden = math.ceil(layers * c_tok / (c_tok + io_h - c_h))
    return Partition(layers - hidden, hidden, 0)


def schedules(setting: Setting, paper: Partition, paper_ratio: float | None) -> Row:
    """Layers by method, and bytes of KV over the bytes that are stored."""
    plan = setting.plan()
    chosen = {
        "paper": paper,
        "ours": plan.partition,
        "closed_form": closed_form(plan.costs, plan.model.layers),
    }
    kv_bytes = Partition(0, 0, plan.model.layers).bytes_per_token(plan.model)
    return {
        "setting": str(setting),
        **{name: found and asdict(found) for name, found in chosen.items()},
        "paper_kv_over_stored": paper_ratio,
        "kv_over_stored": kv_bytes / plan.partition.bytes_per_token(plan.model),
    }


def implied(setting: Setting, over_kv: float) -> Row:
    """The compute share that follows from the paper's speed over KV offload.

    If all hidden states take 1 on the bus and projections take ``x``, which is longer, then KV
    takes 2, and a mix of both ``2 x / (1 + x)``.
    """
    costs, mix = setting.plan().costs, 2 / over_kv
    share = setting.compute_share * costs.c_h / costs.io_h * (2 - mix) / mix
    one_ssd = Setting("Llama-2-7B", ssds=1, compute_share=share)
    return {
        "setting": str(setting),
        "paper": over_kv,
        "compute_share": share,
        "7b_1_ssd_over_kv": restore(one_ssd)["over_kv"],
        "recompute_over_projection": costs.c_tok / costs.c_h,
        "papers_at_most": MOST_OVER_RECOMPUTE * (2 - mix),
    }


def ranges(results: Results) -> list[Row]:
    """The ranges of figures 11 and 12 in the paper's text."""
    return [{**row, "name": RANGES[row["figure"], row["ratio"]][0]} for row in results["ranges"]]


def panels(results: Results) -> dict[str, list[Row]]:
    """Figure 11 (platforms), with the paper's numbers."""
    return {
        "pages in host memory (Figure 11)": [
            {**row, "name": row["setting"].removesuffix(", DRAM").replace("A100-40G SXM4", "A100")}
            for row in results["platforms"]
        ]
    }


def finding(results: Results) -> str:
    (least, most), (low, high) = results["ranges"][0]["ours"], results["ranges"][0]["paper"]
    return (
        f"Simulated, hidden states restore {least:.2f} to {most:.2f} times as fast as K and V; "
        f"the paper measured {low:.2f} to {high:.2f}"
    )


_TABLES = {
    "layers": Table(
        "table_3",
        " = setting | the paper = paper | `hcache plan` = ours | "
        "the paper's closed form, here = closed_form",
    ),
    "ranges": Table(ranges, "how many times as fast = name | the paper = paper | simulated = ours"),
    "contention": Table(
        "contention",
        "times as fast as KV offload = setting | ideal = ideal_over_kv | "
        "copies by few programs = few_programs_over_kv | added up = added_up_over_kv | "
        "added up, hidden states only = added_up_hidden_only_over_kv",
    ),
}
PROGRAM = Program(
    name="paper",
    doc=__doc__,
    measure=lambda run: compute(),
    serves=False,
    tables={"table": tuple(_TABLES.values()), **{name: (one,) for name, one in _TABLES.items()}},
    draw=Picture(
        title=finding,
        panels=panels,
        x="name",
        x_label="model, GPU",
        y_label="times as fast as K and V",
        series=(Series("simulated", "over_kv", "ours"), Series("the paper", "paper", "limit")),
        bars="%.2f",
    ),
)

if __name__ == "__main__":
    PROGRAM.run()
