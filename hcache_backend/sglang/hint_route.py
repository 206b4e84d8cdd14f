"""The route of hints, ``POST /hcache/hint``, on SGLang's HTTP server; runs in its process."""

from __future__ import annotations

import base64
import json
from array import array
from typing import Any

NAME = "hcache:hint"  # stands for a backend; also for a policy, which SGLang alone would refuse
ACTIONS = ("retain", "prefetch", "demote")
MOST_SECONDS = 3600.0
_FIELDS = {"action", "input_ids", "session", "seconds", "shared", "extra_key", "cache_salt"}


class RefusedHint(Exception):
    """Why a hint is not followed; the client gets it with HTTP 400."""


def add_route(server: Any) -> None:
    """Add the route to ``server``, SGLang's module of that name. It needs the admin key, as
    attaching a backend does."""
    from fastapi import Request
    from fastapi.responses import JSONResponse
    from sglang.srt.utils.auth import AuthLevel, auth_level

    async def hint(request: Request) -> JSONResponse:
        try:
            told = json.loads(await request.body())
            return JSONResponse(await _tell(server.get_global_state().tokenizer_manager, told))
        except (RefusedHint, ValueError) as error:
            return JSONResponse({"error": {"message": f"hcache: {error}"}}, 400)

    hint.__annotations__["request"] = Request  # a name of this function, which FastAPI looks up
    auth_level(AuthLevel.ADMIN_OPTIONAL)(hint)
    server.app.add_api_route("/hcache/hint", hint, methods=["POST"])


async def _tell(manager: Any, told: Any) -> list[dict[str, Any]]:
    """Tell a hint to the scheduler of each data-parallel rank; returns their answers."""
    from sglang.srt.managers.io_struct import AttachHiCacheStorageReqInput
    from sglang.srt.runtime_context import get_serving

    if not get_serving().admin_api_key:
        raise RefusedHint("hints need an admin key: start the server with --admin-api-key")
    if manager.config_value("hicache_storage_backend") != "dynamic":
        raise RefusedHint("this server has no L3 of hcache")
    checked = check(told, manager.model_config.vocab_size, manager.context_len)
    manager.auto_create_handle_loop()
    asked = AttachHiCacheStorageReqInput(
        hicache_storage_backend=NAME,
        hicache_storage_backend_extra_config_json=json.dumps(checked),
        hicache_storage_prefetch_policy=NAME,
    )
    answers = await manager.attach_hicache_storage_communicator(asked)
    for answer in answers:
        if not answer.success:
            raise RefusedHint(answer.message)
    return [json.loads(answer.message) for answer in answers]


def check(told: Any, vocabulary: int, longest: int) -> dict[str, Any]:
    """A hint as the scheduler wants it: all fields, token ids as int64 in base64. Raises
    RefusedHint. ``longest``: most tokens of a prompt."""
    if not isinstance(told, dict) or not told.keys() <= _FIELDS:
        raise RefusedHint(f"a hint is a JSON object with some of {sorted(_FIELDS)}")
    hint: dict[str, Any] = dict.fromkeys(_FIELDS) | {"seconds": 300.0, "shared": 0} | told
    seconds, ids, session = hint["seconds"], hint["input_ids"], hint["session"]
    if hint["action"] not in ACTIONS:
        raise RefusedHint(f"'action' is {hint['action']!r}; it must be one of {list(ACTIONS)}")
    if type(seconds) not in (int, float) or not 0 < seconds <= MOST_SECONDS:
        raise RefusedHint(f"'seconds' is {seconds!r}; it must be above 0, at most {MOST_SECONDS:g}")
    if type(hint["shared"]) is not int or hint["shared"] < 0:
        raise RefusedHint("'shared' must be a number of tokens")
    for name in ("session", "extra_key", "cache_salt"):
        if not isinstance(hint[name], str | None):
            raise RefusedHint(f"{name!r} must be a text")
    if (ids is None) == (session is None):
        raise RefusedHint("a hint needs 'input_ids' (token ids) or 'session', and not both")
    if ids is not None:
        if not isinstance(ids, list) or not ids or any(type(token) is not int for token in ids):
            raise RefusedHint("'input_ids' must be a list of token ids")
        if len(ids) > longest:
            raise RefusedHint(f"'input_ids' has {len(ids)} tokens; a prompt has {longest} at most")
        if not 0 <= min(ids) <= max(ids) < vocabulary:
            raise RefusedHint(f"'input_ids' are of another model: this one has {vocabulary} tokens")
        hint["input_ids"] = base64.b64encode(array("q", ids).tobytes()).decode()
    return hint
