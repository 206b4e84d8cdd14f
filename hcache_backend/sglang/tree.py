"""SGLang's radix tree, by its nodes, and what its keys hold."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def token_array(token_ids: Any) -> npt.NDArray[np.int32]:
    """Token ids of a storage operation (a key, a list or an array) as int32 ``[n]``."""
    return np.asarray(getattr(token_ids, "token_ids", token_ids), dtype=np.int64).astype(np.int32)


def is_on_device(tree: Any, node: Hashable) -> bool:
    """True if the device has K and V of all tokens up to the end of a node of SGLang's tree."""
    root = tree.empty_match_result.last_device_node
    return bool(node == root or not tree.is_full_device_evicted(node))


def slots_to(tree: Any, node: Hashable) -> torch.Tensor:
    """Slots of all tokens up to the end of a node of SGLang's tree, int64 ``[n]``."""
    root = tree.empty_match_result.last_device_node
    slots: torch.Tensor = tree.collect_full_device_indices(node, root)
    return slots
