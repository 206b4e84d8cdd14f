"""Every option, once, in the groups of docs/options.md, which explains each. Options are the table
``hcache`` in SGLang's ``--hicache-storage-backend-extra-config``, JSON or ``@file.toml``. The
environment variable ``HCACHE_CONFIG`` has the same table at lower priority, for a later attach or a
backend of SGLang's own."""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

ENABLE_VARIABLE = "HCACHE_ENABLE"
CONFIG_VARIABLE = "HCACHE_CONFIG"
PROJECTION_VARIABLE = "HCACHE_PROJECTION"
OUR_BACKEND = {"module_path": "hcache_backend", "class_name": "HCacheStorage"}  # for SGLang

_OUR_KEYS = ("backend_name", "module_path", "class_name", "interface_v1", "hcache")
_SGLANG_KEYS = (
    # SGLang removes these before it builds a backend; its versions differ in the set.
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "prefetch_timeout_max",
    "hicache_storage_pass_prefix_keys",
    "tp_lcm_size",
)


class ConfigError(ValueError):
    """A wrong option, or file that one names; the message names it, its value and what is right.
    SGLang turns a ValueError into a stopped start, or into HTTP 400 at an attach."""


def default_dirs() -> tuple[Path, ...]:
    """One folder under ``$XDG_CACHE_HOME``, otherwise under ``~/.cache``."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return (Path(root) / "hcache-backend" / "pages",)


def _bytes(value: object) -> object:
    if not isinstance(value, str):
        return value
    # ByteSize ignores what follows a number, as in "500,000,000,000" and "1,5TB".
    if match := _SIZE_TEXT.fullmatch(value.strip().lower()):
        unit = f"{match[2]}b" if match[2] else ""
        return int(_SIZE.validate_python(match[1].replace(",", "") + unit))
    raise ValueError('must be a number of bytes, such as 500000000000 or "500GB"')


_SIZE = pydantic.TypeAdapter(ByteSize)
_SIZE_TEXT = re.compile(r"(\d+(?:\.\d+)?(?=\s*[kmgtpe])|\d+|\d{1,3}(?:,\d{3})+)\s*([kmgtpe]i?)?b?")
Bytes = Annotated[int, BeforeValidator(_bytes)]  # "500GB" is 10^9, "4GiB" is 2^30


def _path(value: object) -> object:
    if value is None or isinstance(value, Path):
        return value
    if not isinstance(value, str) or not Path(value).expanduser().is_absolute():
        raise ValueError("must be the absolute path of a file that hcache profile wrote")
    return Path(value).expanduser()


def _table(right: str) -> BeforeValidator:
    """Tables only; the message says what is ``right``."""

    def table(value: object) -> object:
        if value is None or isinstance(value, Mapping | BaseModel):
            return value
        raise ValueError(f"must be {right}")

    return BeforeValidator(table)


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class PartitionOption(_Table):
    """Numbers of layers by method: first the recomputed ones, last the ones stored as KV."""

    recompute: int = Field(default=0, ge=0)
    hidden: int = Field(default=0, ge=0)
    kv: int = Field(default=0, ge=0)


_PARTITION = '"auto" or numbers of layers, such as {"recompute": 1, "hidden": 30, "kv": 1}'
_SHARED = (
    'a table, such as {"backend": "mooncake", "config": {"master_server_address": "HOST:50051"}}'
)


class SharedOption(_Table):
    """A tier that several machines share, read after the page store of each."""

    backend: Literal["file", "mooncake", "nixl"]
    config: dict[str, Any] = Field(default_factory=dict)
    read_seconds: float = Field(default=1.0, gt=0, le=60, allow_inf_nan=False)
    buffer_bytes: Bytes = Field(default=384 << 20, ge=1)


class KrulOption(_Table):
    """Options of codec ``krul``."""

    ratio: float = Field(default=0.5, gt=0, le=1, allow_inf_nan=False)
    gamma: float = Field(default=0.5, ge=0, le=1, allow_inf_nan=False)
    error: float = Field(default=0.2, ge=0, allow_inf_nan=False)
    pairs: tuple[tuple[int, int], ...] | None = None

    @pydantic.field_validator("pairs", mode="before")
    @classmethod
    def _tuples(cls, value: object) -> object:
        if isinstance(value, list):
            return tuple(tuple(pair) if isinstance(pair, list) else pair for pair in value)
        return value


_TABLES: dict[str, type[_Table]] = {
    "partition": PartitionOption,
    "krul": KrulOption,
    "shared": SharedOption,
}


class HCacheConfig(_Table):
    """The options of one server, immutable."""

    # store
    dirs: tuple[Path, ...] = Field(default_factory=default_dirs)
    quota_bytes: Bytes | None = Field(default=None, ge=1)
    min_free_bytes: Bytes = Field(default=4 << 30, ge=0)
    durability: Literal["none", "batch", "always"] = "batch"
    io_threads: int = Field(default=8, ge=1, le=64)
    reader: Literal["posix", "kvikio"] = "posix"
    events: bool = False
    state_tokens: int = Field(default=1024, ge=0)
    # what is stored
    mode: Literal["auto", "hidden", "kv", "plain"] = "auto"
    partition: Annotated[
        Annotated[Literal["auto"], pydantic.Tag("auto")]
        | Annotated[PartitionOption, _table(_PARTITION), pydantic.Tag("layers")],
        pydantic.Discriminator(lambda value: "auto" if value == "auto" else "layers"),
    ] = "auto"
    profile: Annotated[Path | None, BeforeValidator(_path)] = None
    codec: Literal["auto", "none", "exp3", "exp4", "int8", "fp8", "krul"] = "auto"
    krul: Annotated[KrulOption, _table('a table, such as {"ratio": 0.5, "error": 0.3}')] = (
        KrulOption()
    )
    # checks
    check_every_pages: int = Field(default=64, ge=0)
    sglang: Literal["checked", "tested"] = "checked"
    # restore and recompute
    min_gain: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    restore: Literal["auto", "layerwise"] = "auto"
    recompute: Literal["auto", "never"] = "auto"
    recompute_ms: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    # sharing
    shared: Annotated[SharedOption | None, _table(_SHARED)] = None

    @pydantic.field_validator("dirs", mode="before")
    @classmethod
    def _paths(cls, value: object) -> object:
        if not isinstance(value, list | tuple) or not value:
            raise ValueError('must be a list of at least one folder, such as ["/mnt/ssd0/hcache"]')
        paths = []
        for item in value:
            if not isinstance(item, str | Path) or not str(item):
                raise ValueError(f"every folder must be a path, not {item!r}")
            path = Path(item).expanduser()
            if not path.is_absolute():
                raise ValueError(f"every folder must be an absolute path, not {str(item)!r}")
            paths.append(path)
        if len(set(paths)) != len(paths):
            raise ValueError("every folder may be named once only")
        return tuple(paths)

    @pydantic.model_validator(mode="after")
    def _together(self) -> HCacheConfig:
        asked = self.partition if isinstance(self.partition, PartitionOption) else PartitionOption()
        other = self.mode in ("hidden", "plain") or asked.hidden or asked.recompute
        if self.codec == "krul" and other:
            raise ValueError(
                "option 'codec' is 'krul': options 'mode' and 'partition' must let K and V of all "
                "layers be stored in own pages"
            )
        if self.recompute == "never" and asked.recompute:
            raise ValueError(
                "option 'recompute' is 'never': option 'partition' must store all layers, but "
                f"leaves out the first {asked.recompute} ('recompute')"
            )
        return self


FIXED_AT_START = HCacheConfig.model_fields.keys() - {
    *("dirs", "quota_bytes", "min_free_bytes", "durability", "io_threads", "reader"),
    *("min_gain", "shared", "events", "state_tokens"),
}  # an attach may set the others


def parse_config(
    options: object, source: str, inherited: HCacheConfig | None = None
) -> HCacheConfig:
    """Build the configuration from the table ``options``; a ConfigError has all wrong options.
    ``source``: origin of the table, for messages. ``inherited`` options replace the defaults."""
    options = {} if options is None else options
    if not isinstance(options, Mapping):
        raise ConfigError(
            f'{source}: must be a table of options, such as {{"dirs": ["/mnt/ssd0/hcache"]}}, '
            f"not {options!r}"
        )
    try:
        known = inherited.model_dump(exclude_unset=True) if inherited is not None else {}
        return HCacheConfig.model_validate({**known, **options})
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(one, source) for one in error.errors())) from None


def check_extra_config(extra: Mapping[str, Any]) -> None:
    """Raise ConfigError for an unknown key beside ours, or an ``interface_v1`` other than 1."""
    for key, value in extra.items():
        if key not in _OUR_KEYS + _SGLANG_KEYS:
            if key in HCacheConfig.model_fields:
                hint = f'it belongs under the key \'hcache\': {{"hcache": {{"{key}": ...}}}}'
            else:
                hint = nearest(key, _OUR_KEYS + _SGLANG_KEYS, "known: ")
            raise ConfigError(f"extra config: unknown key {key!r} (value {value!r}); {hint}")
    if extra.get("interface_v1") != 1:
        raise ConfigError(
            f"extra config: 'interface_v1' is {extra.get('interface_v1')!r}; it must be 1, so that "
            "SGLang hands over pages without copying them"
        )


def start_config(extra: Mapping[str, Any] | None) -> HCacheConfig:
    """Options at a server's start: ``extra`` (None if L3 is not ours) over the environment."""
    environment = config_from_environment()
    if extra is None:
        return environment
    check_extra_config(extra)
    return parse_config(extra.get("hcache"), "hcache", environment)


def is_enabled(environ: Mapping[str, str] = os.environ) -> bool:
    """True if ``HCACHE_ENABLE`` asks for us without our L3; ConfigError unless it is 0 or 1."""
    enabled = environ.get(ENABLE_VARIABLE, "0")
    if enabled not in ("0", "1"):
        raise ConfigError(f"{ENABLE_VARIABLE} is {enabled!r}; it must be 0 or 1")
    return enabled == "1"


def config_from_environment(environ: Mapping[str, str] = os.environ) -> HCacheConfig:
    """Options of ``HCACHE_CONFIG`` over the defaults; raises ConfigError."""
    text = environ.get(CONFIG_VARIABLE, "")
    return parse_config(load_table(text, CONFIG_VARIABLE) if text else None, CONFIG_VARIABLE)


def load_table(text: str, source: str) -> object:
    """Parse ``text``: JSON, or ``@file.toml``. Raises a ConfigError that begins with ``source``."""
    if text.startswith("@"):
        path = Path(text[1:])
        try:
            return tomllib.loads(path.read_text())
        except OSError as error:
            raise ConfigError(f"{source}: cannot read {path}: {error.strerror}") from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{source}: {path} is not TOML: {error}") from None
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source}: neither JSON nor @file.toml: {error} in {text!r}") from None


def nearest(name: str, known: Collection[str], what: str) -> str:
    """Hint for an unknown ``name``: the most similar of ``known``, otherwise all of them."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"{what}{', '.join(known)}"


def _explain(detail: ErrorDetails, source: str) -> str:
    path = [str(part) for part in detail["loc"] if part != "layers"]  # the tag of a partition
    key = ".".join(path)
    if detail["type"] == "extra_forbidden":
        *table, name = path
        known = (_TABLES[table[0]] if table else HCacheConfig).model_fields
        hint = nearest(name, known, "the options are ")
        return f"{source}: unknown option {key!r} (value {detail['input']!r}); {hint}"
    message = detail["msg"].removeprefix("Value error, ").replace("Input should", "must")
    if not key:  # about several options; the message names them
        return f"{source}: {message}"
    return f"{source}: option {key!r} is {detail['input']!r}: {message}"
