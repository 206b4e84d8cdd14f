"""Checks of what kernels are given: they raise a ValueError that names the argument. Only
:func:`check_range` reads values, so that the others never wait for a GPU."""

import torch

INDEX_TYPES = (torch.int32, torch.int64)
BYTES = (torch.uint8,)

Size = int | str | tuple[int, ...]  # one size, any size (a name), or one of several


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    types: tuple[torch.dtype, ...],
    shape: tuple[Size, ...],
    device: torch.device | None = None,
    *,
    whole: bool = True,
) -> None:
    """Refuse a tensor of another type or shape, on another device, or whose values have gaps. If it
    is not to be ``whole``, only values along the last dimension are without gaps."""
    sizes = tuple(tensor.shape)
    if len(sizes) != len(shape) or not all(map(_is, sizes, shape)):
        raise wrong(name, sizes, f"[{', '.join(map(_text, shape))}]")
    if tensor.dtype not in types:
        raise wrong(name, tensor.dtype, " or ".join(map(_text, types)))
    if not (tensor.is_contiguous() if whole else tensor.stride(-1) == 1):
        raise wrong(name, f"strides {tensor.stride()}", "contiguous" if whole else "last stride 1")
    if device is not None and tensor.device != device:
        raise wrong(name, tensor.device, f"on {device}")


def check_range(name: str, values: torch.Tensor, limit: int, what: str) -> None:
    """Refuse integers below 0, or not below ``limit``, which is the number of ``what``."""
    if values.numel() and not 0 <= int(values.min()) <= int(values.max()) < limit:
        raise ValueError(
            f"{name} go from {int(values.min())} to {int(values.max())}: must be from 0 to "
            f"{limit - 1}, {what}"
        )


def wrong(name: str, value: object, right: str) -> ValueError:
    """What to raise. Made only then: texts for what is right would cost more than the checks."""
    return ValueError(f"{name}: {value} is not {right}")


def _is(size: int, want: Size) -> bool:
    if isinstance(want, tuple):
        return size in want
    return isinstance(want, str) or size == want


def _text(want: Size | torch.dtype) -> str:
    if isinstance(want, tuple):
        return " or ".join(map(str, want))
    return str(want).removeprefix("torch.")
