"""Triton's interpreter, on which dry runs run kernels."""

from __future__ import annotations

import os
from typing import Any


def interpret() -> None:
    """Have kernels interpreted that are defined from now on."""
    os.environ["TRITON_INTERPRET"] = "1"
    mend_scalars()


def mend_scalars() -> None:
    """Let loops count to arguments of a kernel, which are arrays with one value.

    Triton 3.6 turns them into integers as NumPy 2.4 no longer does; from 3.7 on it is mended.
    """
    from triton.runtime import interpreter

    shipped = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        shipped(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch
