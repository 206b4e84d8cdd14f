"""The codes of ``int8``, and lines of values through them, in plain torch."""

import torch

SMALLEST, GREATEST = 2.0**-100, 2.0**100
LARGEST = 127.0


def encode_lines(
    values: torch.Tensor, along: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Encode float32 values whose lines are along dimension number ``along``. Returns codes, uint8,
    like ``values``; the largest magnitude of every line, float32; and which lines fit, bool. The
    last two have one value along that dimension."""
    most = values.abs().amax(along, keepdim=True)
    usable = (most >= SMALLEST) & (most <= GREATEST)  # neither of them for a NaN
    fits = usable | (values == 0).all(along, keepdim=True)
    most = torch.where(usable, most, 0.0)
    # A tensor: torch multiplies by reciprocals of Python's floats.
    inverse = torch.where(usable, torch.full_like(most, LARGEST) / most, 0.0)
    scaled = (torch.where(usable, values, 0.0) * inverse).clamp(-LARGEST, LARGEST)
    return scaled.round().to(torch.int8).view(torch.uint8), most, fits
