"""K and V of one layer from its hidden states, into the paged pool."""

from .checks import check_projection, check_rows
from .dispatch import compute_kv, project_kv
from .reference import finish_keys
from .spec import KeyNorm, KVPool, KVProjection, Rotary

__all__ = [
    "KVPool",
    "KVProjection",
    "KeyNorm",
    "Rotary",
    "check_projection",
    "check_rows",
    "compute_kv",
    "finish_keys",
    "project_kv",
]
