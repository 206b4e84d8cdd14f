"""The ways of ``project_kv`` on Triton, with their tiles and schedules. Tests compile every one.
Which of them is the fastest is measured once on a device, and kept in a file.

- fused: one launch multiplies, and finishes K and V on the accumulators.
- library: cuBLAS, through torch, multiplies and adds the bias before it rounds; the same kernel
  then reads the product. No product is faster, but K and V go through memory once more.

The file is ``hcache/project_kv-DEVICE.json`` under ``$XDG_CACHE_HOME`` (default ``~/.cache``).
Without a measurement the library way is taken: its product is tuned for every device.
``triton.autotune`` cannot choose: it would measure in the middle of a restore.
"""

import contextlib
import json
import logging
import math
import os
import re
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import torch
import triton

from ..launch import Launch, gpu_microseconds
from .kernel import project_kv_kernel
from .spec import FP8_TYPES, KVPool, KVProjection, LayerKind, ProjectionCall, kind_of

EPILOGUE_TILE = 4096  # numbers that a program without a product holds: 32 a thread in 4 warps
LARGEST_ROW = 16384  # numbers of a row of K, padded, in a program with a norm over all heads


@dataclass(frozen=True)
class TileConfig:
    rows: int  # tokens of a tile
    heads: int  # of a tile, all of K or all of V
    depth: int  # hidden dimensions that are multiplied at a time; 0: the product is finished
    warps: int  # of a program
    stages: int  # tiles in flight between memory and the tensor cores
    group: int = 8  # row tiles that share the weights they read


def head_pairs(head_dim: int) -> int:
    """Pairs of a head in a tile: half its dimensions, up to a power of two."""
    return int(triton.next_power_of_2(head_dim // 2))


def epilogue_config(projection: KVProjection) -> TileConfig:
    """The configuration for a finished product; a norm over all heads wants whole rows."""
    head = 2 * head_pairs(projection.head_dim)
    heads = int(triton.next_power_of_2(projection.kv_heads))
    if projection.norm is None or projection.norm.over == "head":
        heads = min(heads, EPILOGUE_TILE // head)
    rows = max(1, EPILOGUE_TILE // (heads * head))
    warps = max(4, rows * heads * head // 1024)
    return TileConfig(rows=rows, heads=heads, depth=0, warps=warps, stages=1)


@lru_cache
def fused_configs(kind: LayerKind, capability: tuple[int, int]) -> tuple[TileConfig, ...]:
    """The fused way's configurations for a kind of layer, on compute capability 8.0 or more.

    None of them spills, whatever norm, RoPE, biases and types of such a layer: tests compile them
    for 8.0, 8.9, 9.0 and 10.0. Empty for heads too small for a product of tiles, and when rows of
    the weight are not aligned to 16 numbers: loading them would take so many instructions that the
    library is always faster."""
    if kind.hidden % 16 or kind.head_dim < 16:
        return ()
    head = 2 * head_pairs(kind.head_dim)
    if kind.dtype == torch.float32:
        # Without tensor cores: TF32 would not be the model's precision.
        return (TileConfig(rows=32 if head <= 128 else 16, heads=1, depth=16, warps=4, stages=2),)
    if head > 128:
        return (TileConfig(rows=64, heads=1, depth=64, warps=8, stages=2),)
    heads = min(128 // head, 1 << (kind.kv_heads.bit_length() - 1))
    # What the accumulators leave of the registers must hold the norm's and RoPE's operands.
    norm_and_rope = kind.norm == "head" and kind.rotary != "none"
    masked = kind.head_dim != head  # columns
    warps = 8 if norm_and_rope and masked and capability >= (10, 0) else 4
    configs = [TileConfig(rows=64, heads=heads, depth=64, warps=warps, stages=3)]
    if not (norm_and_rope and capability >= (10, 0)):
        configs.append(TileConfig(rows=128, heads=heads, depth=64, warps=8, stages=3))
        if capability in ((8, 0), (9, 0), (10, 0)):  # those with much shared memory
            configs.append(TileConfig(rows=128, heads=heads, depth=64, warps=8, stages=4))
    # On 8.0 two heads of 128 with pairs side by side are turned with 40 bytes more than registers.
    spills = capability == (8, 0) and kind.head_dim == 128 and kind.rotary == "interleaved"
    roomy = not (norm_and_rope or masked or spills)
    if capability in ((8, 0), (9, 0)) and roomy and kind.kv_heads >= 2 * heads:
        configs.append(TileConfig(rows=128, heads=2 * heads, depth=64, warps=8, stages=3))
    return tuple(configs)


@dataclass(frozen=True)
class Way:
    """A way to run ``project_kv`` on a GPU: fused, with a configuration, or by the library."""

    config: TileConfig | None

    def run(self, call: ProjectionCall, product: torch.Tensor | None = None) -> None:
        """Like :func:`hcache_kernels.project_kv.project_kv`, unchecked, ``n >= 1``."""
        if self.config is not None:
            launches = fused_launches(call, self.config, product)
        else:
            weight, bias = call.projection.weight, call.projection.bias
            kv = _columns(call, len(weight), product)
            if bias is None:
                torch.mm(call.hidden, weight.t(), out=kv)
            else:
                torch.addmm(bias, call.hidden, weight.t(), out=kv)
            launches = [epilogue_launch(kv, call)]
        for launch in launches:
            launch.run()


LIBRARY = Way(None)


@lru_cache
def possible_ways(
    kind: LayerKind, pool_type: torch.dtype, capability: tuple[int, int]
) -> tuple[Way, ...]:
    """The ways that a device can run a layer, the default first; none: only torch can."""
    # Triton converts to e4m3 only where the hardware does.
    oldest = (8, 9) if pool_type == torch.float8_e4m3fn else (8, 0)
    row = int(triton.next_power_of_2(kind.kv_heads)) * 2 * head_pairs(kind.head_dim)
    if capability < oldest or (kind.norm == "all" and row > LARGEST_ROW):
        return ()
    return (LIBRARY, *map(Way, fused_configs(kind, capability)))


def _columns(call: ProjectionCall, columns: int, memory: torch.Tensor | None) -> torch.Tensor:
    """Memory for a product, ``[n, columns]``: the begin of flat ``memory``; None: new memory."""
    shape = len(call.hidden), columns
    return (
        call.hidden.new_empty(shape) if memory is None else memory[: math.prod(shape)].view(shape)
    )


def fused_launches(
    call: ProjectionCall, config: TileConfig, product: torch.Tensor | None = None
) -> list[Launch]:
    """The fused way's launches, in order. One, unless K is normalised over all heads: no tile holds
    a whole row of K then, so K without norm goes through ``product``, ``[n, kv_heads * head_dim]``,
    and a second launch finishes it."""
    projection = call.projection
    if projection.norm is None or projection.norm.over == "head":
        return [_launch(call, config)]
    heads, dim = projection.kv_heads, projection.head_dim
    keys = _columns(call, heads * dim, product).view(-1, heads, dim)
    bare = replace(projection, norm=None, rotary=None)
    product = replace(call, projection=bare, pool=replace(call.pool, k=keys))
    return [_launch(product, config, keys_by_row=True), epilogue_launch(keys.flatten(1), call)]


def epilogue_launch(kv: torch.Tensor, call: ProjectionCall) -> Launch:
    """Norm, RoPE and scatter of a finished product with its bias, ``[n, 2 * kv_heads * head_dim]``;
    or of its K half alone: then nothing writes V."""
    return _launch(replace(call, hidden=kv), epilogue_config(call.projection))


def _launch(call: ProjectionCall, config: TileConfig, keys_by_row: bool = False) -> Launch:
    """The launch of the kernel. If ``config`` has no depth, ``call.hidden`` is a finished product.
    With ``keys_by_row`` K of token i goes to row i of ``pool.k`` instead of its slot."""
    source, projection, pool = call.hidden, call.projection, call.pool
    n, depth = source.shape
    heads, dim, pairs = projection.kv_heads, projection.head_dim, head_pairs(projection.head_dim)
    norm, rotary = projection.norm, projection.rotary
    parts = 2 if config.depth else depth // (heads * dim)  # 2: K and V; 1: the product is K alone

    norm_weight, norm_bias = (norm.weight, norm.bias) if norm else (None, None)

    def head_stride(parameter: torch.Tensor | None) -> int:  # 0: all heads have the same, or none
        return dim if parameter is not None and len(parameter) != dim else 0

    def limit(part: torch.Tensor) -> float | None:  # largest value of fp8; None for other types
        return torch.finfo(part.dtype).max if part.dtype in FP8_TYPES else None

    args = {"source": source, "source_stride": source.stride(0), "n": n, "depth": depth}
    args |= {"weight": projection.weight if config.depth else None, "bias": projection.bias}
    args |= {"weight_stride": projection.weight.stride(0), "KEYS_BY_ROW": keys_by_row}
    args |= {"positions": call.positions, "slots": call.slots, "ROUNDING": projection.rounding}
    args |= {"pool_k": pool.k, "k_scale": pool.k_scale, "K_LIMIT": limit(pool.k)}
    args |= {"k_slot_stride": pool.k.stride(0), "k_head_stride": pool.k.stride(1)}
    args |= {"pool_v": pool.v, "v_scale": pool.v_scale, "V_LIMIT": limit(pool.v)}
    args |= {"v_slot_stride": pool.v.stride(0), "v_head_stride": pool.v.stride(1)}
    args |= {"norm_weight": norm_weight, "norm_weight_head_stride": head_stride(norm_weight)}
    args |= {"norm_bias": norm_bias, "norm_bias_head_stride": head_stride(norm_bias)}
    args |= {"NORM": norm.kind if norm else None, "epsilon": norm.epsilon if norm else 0.0}
    args |= {"OVER_ALL": norm is not None and norm.over == "all"}
    args |= {"cos_sin": rotary.cos_sin if rotary else None}
    args |= {"ROTARY_DIM": rotary.rotary_dim if rotary else 0}
    args |= {"INTERLEAVED": rotary is not None and rotary.style == "interleaved"}
    args |= {"KV_HEADS": heads, "HEAD_DIM": dim, "PAIRS": pairs, "PARTS": parts, "TILE": config}
    args |= {"DEPTH_EVEN": config.depth > 0 and depth % config.depth == 0}
    args |= {"COLUMNS_EVEN": heads % config.heads == 0 and dim == 2 * pairs}
    grid = (triton.cdiv(n, config.rows) * parts * triton.cdiv(heads, config.heads),)
    return Launch(project_kv_kernel, grid, args, config.warps, config.stages)


logger = logging.getLogger(__name__)

ROWS = (256, 512, 1024, 2048, 4096, 8192, 16384)  # numbers of tokens that are measured


class ChoiceTable:
    """The fastest way of each kind of layer and number of tokens that was measured on one device. A
    file that cannot be read counts as not measured."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fastest: dict[str, dict[int, Way]] = {}
        try:
            self._fastest = {
                kind: {
                    int(rows): Way(None if config is None else TileConfig(**config))
                    for rows, config in ways.items()
                }
                for kind, ways in json.loads(path.read_text()).items()
            }
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, AttributeError) as error:
            logger.warning("%s is unreadable and will be measured again: %r", path, error)

    def measured(self, kind: LayerKind) -> set[int]:
        return set(self._fastest.get(str(kind), ()))

    def pick(self, kind: LayerKind, n: int) -> Way | None:
        """The fastest way at the measured number of tokens nearest to ``n``; None: unmeasured."""
        measured = self._fastest.get(str(kind))
        if not measured:
            return None
        return measured[min(measured, key=lambda rows: abs(math.log2(rows / n)))]

    def add(self, kind: LayerKind, rows: int, microseconds: dict[Way, float]) -> None:
        """Note which way was the fastest; takes the place of what was measured before."""
        fastest = min(microseconds, key=microseconds.__getitem__)
        self._fastest.setdefault(str(kind), {})[rows] = fastest

    def save(self) -> None:
        """Write the file at once or not at all. A failure is logged: one can measure again."""
        configs = {
            kind: {rows: way.config and asdict(way.config) for rows, way in ways.items()}
            for kind, ways in self._fastest.items()
        }
        draft = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(configs, indent=1))
            draft.replace(self.path)
        except OSError as error:
            logger.warning("cannot keep measurements in %s: %s", self.path, error)
            with contextlib.suppress(OSError):
                draft.unlink()


@lru_cache
def device_table(index: int) -> ChoiceTable:
    """The table of a CUDA device, read once a process."""
    return ChoiceTable(table_path(torch.cuda.get_device_name(index)))


def table_path(device_name: str) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    slug = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    return Path(cache) / "hcache" / f"project_kv-{slug}.json"


def choose(kind: LayerKind, pool_type: torch.dtype, n: int, device: torch.device) -> Way | None:
    """How a CUDA device projects ``n`` tokens of a layer; None: in torch."""
    possible = possible_ways(kind, pool_type, torch.cuda.get_device_capability(device))
    if not possible:
        return None
    measured = device_table(device.index).pick(kind, n)
    # A file of another version may name a configuration that is gone.
    return measured if measured in possible else possible[0]


def ways_in_use(projection: KVProjection, pool_type: torch.dtype) -> list[Way | None]:
    """How a layer is projected, whatever the number of tokens; None: in torch."""
    device, kind = projection.weight.device, kind_of(projection)
    if device.type != "cuda":
        return [None]
    return [*{choose(kind, pool_type, n, device) for n in ROWS}]


def measure_choice(projection: KVProjection, pool_type: torch.dtype) -> None:
    """Time every way for a layer on its CUDA device, on random hidden states, unless the device's
    table has that kind of layer. It compiles every configuration, which takes seconds, and
    allocates the hidden states, K and V of the largest number of tokens."""
    device = projection.weight.device
    kind = kind_of(projection)
    table = device_table(device.index)
    todo = [n for n in ROWS if n not in table.measured(kind)]
    possible = possible_ways(kind, pool_type, torch.cuda.get_device_capability(device))
    if not possible or not todo:
        return
    for n in todo:
        call = _random_call(projection, pool_type, n)
        table.add(kind, n, {way: gpu_microseconds(partial(way.run, call)) for way in possible})
    table.save()


def _random_call(projection: KVProjection, pool_type: torch.dtype, n: int) -> ProjectionCall:
    """A call for ``n`` tokens with random hidden states, in new memory, to time ways with."""
    weight, rotary, device = projection.weight, projection.rotary, projection.weight.device
    hidden = torch.randn(n, weight.shape[1], device=device).to(weight.dtype)
    positions = torch.arange(n, device=device)
    if rotary is not None:
        positions %= len(rotary.cos_sin)
    shape = (n, projection.kv_heads, projection.head_dim)
    k, v = (torch.empty(shape, dtype=pool_type, device=device) for _ in "kv")
    slots = torch.randperm(n, device=device)
    return ProjectionCall(hidden, positions, slots, projection, KVPool(k, v))
