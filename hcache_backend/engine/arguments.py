"""SGLang's server arguments as they are after resolution.

From 0.5.21 on the record keeps what the user typed and a view holds what SGLang made of it.
"""

from __future__ import annotations

from typing import Any


def resolved(server_args: Any) -> Any:
    """An object whose attributes are the arguments in force."""
    try:
        from sglang.srt.arg_groups.model_override_base import resolved_view
    except ImportError:
        return server_args
    return resolved_view(server_args)


def page_size(server_args: Any) -> int:
    """Tokens a page; SGLang's default is 1."""
    return int(resolved(server_args).page_size or 1)
