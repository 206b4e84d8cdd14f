"""The codes of ``int8`` and ``fp8``, and a plane of units through them, in plain torch."""

import torch

SMALLEST, GREATEST = 2.0**-100, 2.0**100
INT8_LARGEST = 127.0
FP8_LARGEST = 448.0


def nearest_codes(scaled: torch.Tensor, largest: float) -> torch.Tensor:
    """Codes (uint8) of the integers, or the values of e4m3, that are nearest to float32 values.

    ``largest`` is that of the code, :data:`INT8_LARGEST` or :data:`FP8_LARGEST`; what is beyond it
    gets the code of it.
    """
    scaled = scaled.clamp(-largest, largest)
    if largest == INT8_LARGEST:
        return scaled.round().to(torch.int8).view(torch.uint8)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8)


def values_of_codes(codes: torch.Tensor, largest: float) -> torch.Tensor:
    """The float32 values that codes (uint8) stand for."""
    kind = torch.int8 if largest == INT8_LARGEST else torch.float8_e4m3fn
    return codes.contiguous().view(kind).float()


def encode_lines(
    values: torch.Tensor, along: int, largest: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Encode float32 values whose lines are those ``along`` a dimension.

    Returns:
        Codes, uint8; the largest magnitude of every line, float32; and which lines fit, bool. Both
        have one value along that dimension.
    """
    most = values.abs().amax(along, keepdim=True)
    usable = (most >= SMALLEST) & (most <= GREATEST)  # neither of them for a NaN
    fits = usable | (values == 0).all(along, keepdim=True)
    most = torch.where(usable, most, 0.0)
    # A tensor: torch multiplies by reciprocals of Python's floats.
    inverse = torch.where(usable, torch.full_like(most, largest) / most, 0.0)
    codes = nearest_codes(torch.where(usable, values, 0.0) * inverse, largest)
    return codes, most, fits
