"""The route of hints, ``POST /hcache/hint``, on SGLang's HTTP server; runs in its process."""

from __future__ import annotations

import base64
import json
from array import array
from typing import Any, Literal
from uuid import uuid4

from pydantic import BaseModel, Field, ValidationError

NAME = "hcache:hint"  # stands for a backend; also for a policy, which SGLang alone would refuse
_PATH = "/hcache/hint"


class Told(BaseModel, strict=True, extra="forbid"):
    """A hint as a client sends it; docs/operations.md has its fields."""

    action: Literal["retain", "prefetch", "demote"]
    input_ids: list[int] | None = Field(None, min_length=1)
    session: str | None = None
    seconds: float = Field(300.0, gt=0, le=3600)
    extra_key: str | None = None
    cache_salt: str | None = None


class RefusedHint(Exception):
    """Why a hint is not followed; the client gets it with HTTP 400."""


def add_route(app: Any) -> None:
    """Add the route to SGLang's server. It needs the admin key, as attaching a backend does."""
    from fastapi import Request
    from fastapi.responses import JSONResponse
    from sglang.srt.utils.auth import AuthLevel, auth_level

    async def hint(body: Request) -> JSONResponse:
        from sglang.srt.entrypoints.http_server import get_global_state

        try:
            told = Told.model_validate_json(await body.body())
            return JSONResponse(await _tell(get_global_state().tokenizer_manager, told))
        except ValidationError as error:
            first, *_ = error.errors()
            where = ".".join(map(str, first["loc"]))
            problem = ": ".join(filter(None, (where, first["msg"])))
        except RefusedHint as error:
            problem = str(error)
        return JSONResponse({"error": {"message": f"hcache: {problem}"}}, 400)

    hint.__annotations__["body"] = Request  # a name of this function, which FastAPI looks up
    auth_level(AuthLevel.ADMIN_OPTIONAL)(hint)
    if all(getattr(route, "path", None) != _PATH for route in app.routes):
        app.add_api_route(_PATH, hint, methods=["POST"])


async def _tell(tokenizer_manager: Any, told: Told) -> list[dict[str, Any]]:
    """Tell a hint to the scheduler of each data-parallel rank; returns their answers."""
    from sglang.srt.managers.io_struct import AttachHiCacheStorageReqInput
    from sglang.srt.runtime_context import get_serving

    if not get_serving().admin_api_key:
        raise RefusedHint("hints need an admin key: start the server with --admin-api-key")
    if tokenizer_manager.config_value("hicache_storage_backend") != "dynamic":
        raise RefusedHint("this server has no L3 of hcache")
    vocabulary, longest = tokenizer_manager.model_config.vocab_size, tokenizer_manager.context_len
    checked = json.dumps(as_sent(told, vocabulary, longest))
    tokenizer_manager.auto_create_handle_loop()
    asked = AttachHiCacheStorageReqInput(
        hicache_storage_backend=NAME,
        hicache_storage_backend_extra_config_json=checked,
        hicache_storage_prefetch_policy=NAME,
    )
    answers = await tokenizer_manager.attach_hicache_storage_communicator(asked)
    for answer in answers:
        if not answer.success:
            raise RefusedHint(answer.message)
    return [json.loads(answer.message) for answer in answers]


def as_sent(told: Told, vocabulary: int, longest: int) -> dict[str, Any]:
    """A hint for the scheduler, with a name that no request has. Raises RefusedHint."""
    ids = told.input_ids
    if (ids is None) == (told.session is None):
        raise RefusedHint("a hint needs 'input_ids' (token ids) or 'session', and not both")
    if ids is not None and len(ids) > longest:
        raise RefusedHint(f"'input_ids' has {len(ids)} tokens; a prompt has {longest} at most")
    if ids is not None and not 0 <= min(ids) <= max(ids) < vocabulary:
        raise RefusedHint(f"'input_ids' are of another model: this one has {vocabulary} tokens")
    sent = base64.b64encode(array("q", ids or ()).tobytes()).decode()
    return told.model_dump() | {"input_ids": sent, "name": f"{NAME}:{uuid4().hex}"}
