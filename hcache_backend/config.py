"""Every option, once, in the groups of docs/options.md, which explains each. Options are the table
``hcache`` in SGLang's ``--hicache-storage-backend-extra-config``, JSON or ``@FILE``. The
environment variable ``HCACHE_CONFIG`` has the same table at lower priority, for a later attach or a
backend of SGLang's own."""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import yaml
from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

ENABLE_VARIABLE = "HCACHE_ENABLE"
CONFIG_VARIABLE = "HCACHE_CONFIG"
PROJECTION_VARIABLE = "HCACHE_PROJECTION"
OUR_BACKEND = {"module_path": "hcache_backend", "class_name": "HCacheStorage"}  # for SGLang

OUR_KEYS = ("backend_name", "module_path", "class_name", "interface_v1", "hcache")
_SGLANG_KEYS: dict[str, tuple[type, ...]] = {
    # SGLang removes these before it builds a backend; its versions differ in the set.
    "prefetch_threshold": (int,),
    "prefetch_timeout_base": (int, float),
    "prefetch_timeout_per_ki_token": (int, float),
    "prefetch_timeout_max": (int, float),
    "hicache_storage_pass_prefix_keys": (bool,),
    "tp_lcm_size": (int,),  # a start knows which numbers are right
}


class ConfigError(ValueError):
    """A wrong option, or file that one names; the message names it, its value and what is right.
    SGLang turns a ValueError into a stopped start, or into HTTP 400 at an attach."""


def default_dirs() -> list[str]:
    """The default of option ``dirs``: one folder under ``$XDG_CACHE_HOME``, otherwise ``~/.cache``.
    Only a start without the option checks it: a user of a container may have no home folder."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    root = root if Path(root).is_absolute() else "~/.cache"  # the XDG rule for relative ones
    return [f"{root}/hcache-backend/pages"]


# ByteSize ignores what it does not understand: "500,000,000,000" would be 500 bytes. Commas are
# taken where messages print them, in whole bytes; "1,5TB" and "500.000" mean two things.
_SIZES = re.compile(
    r"(\d{1,30}|\d{1,3}(,\d{3}){1,9}) ?(bytes|B)?|\d{1,9}(\.\d+)? ?[KMGTPE]i?B?", re.A | re.I
)
_SIZE = pydantic.TypeAdapter(ByteSize)


def _bytes(value: object) -> object:
    """A text such as "500GB" as a number of bytes; other types as they are. Raises ValueError."""
    if not isinstance(value, str):
        return value
    if not _SIZES.fullmatch(size := value.strip()):
        raise ValueError('must be a number of bytes, such as 500000000000 or "500GB"')
    size = size.lower().replace(",", "").removesuffix("bytes").removesuffix("b")
    return int(_SIZE.validate_python(f"{size}b"))


Bytes = Annotated[int, BeforeValidator(_bytes)]  # "500GB" is 10^9, "4GiB" and "4Gi" are 2^30


def _absolute(value: object) -> Path:
    """The path of an option, with ``~`` replaced; ValueError unless it is absolute then."""
    why = f", not {value!r}"
    try:
        path = Path(value).expanduser() if isinstance(value, str | Path) else Path()
        if path.is_absolute() and b"\0" not in os.fsencode(path):
            return path
    except UnicodeEncodeError:
        pass
    except RuntimeError:
        why = f": no home folder is known for {str(value)!r}"
    raise ValueError(f"must be an absolute path{why}")


_Absolute = Annotated[Path, BeforeValidator(_absolute)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class PartitionOption(_Table):
    """Numbers of layers by method: first the recomputed ones, last the ones stored as KV."""

    recompute: int = Field(default=0, ge=0)
    hidden: int = Field(default=0, ge=0)
    kv: int = Field(default=0, ge=0)


class SharedOption(_Table):
    """A tier that several machines share, read after the page store of each."""

    backend: Literal["file", "mooncake", "nixl"]
    config: pydantic.Secret[dict[str, Any]] = Field(default_factory=lambda: pydantic.Secret({}))
    read_seconds: float = Field(default=1.0, gt=0, le=60, allow_inf_nan=False)
    buffer_bytes: Bytes = Field(default=384 << 20, ge=1)


_Pair = Annotated[tuple[int, int], Field(strict=False)]  # JSON has lists only


class KrulOption(_Table):
    """Options of codec ``krul``."""

    ratio: float = Field(default=0.5, gt=0, le=1, allow_inf_nan=False)
    gamma: float = Field(default=0.5, ge=0, le=1, allow_inf_nan=False)
    error: float = Field(default=0.2, ge=0, allow_inf_nan=False)
    pairs: Annotated[tuple[_Pair, ...], Field(strict=False)] | None = None


_TABLES: dict[str, type[_Table]] = {
    "partition": PartitionOption,
    "krul": KrulOption,
    "shared": SharedOption,
}
_RIGHT = {
    "dirs": 'a list of at least one folder, such as ["/mnt/ssd0/hcache"]',
    "partition": '"auto" or numbers of layers, such as {"recompute": 1, "hidden": 30, "kv": 1}',
    "krul": 'a table, such as {"ratio": 0.5, "error": 0.3}',
    "shared": 'a table, such as {"backend": "mooncake", "config": {"protocol": "rdma"}}',
}


def _once(dirs: tuple[Path, ...]) -> tuple[Path, ...]:
    if not dirs:
        raise ValueError(f"must be {_RIGHT['dirs']}")
    if len(set(dirs)) != len(dirs):
        raise ValueError("every folder may be named once only")
    return dirs


PageKind = Literal["hidden", "kv", "plain"]
"""Pages of a server: our own of hidden states, our own of K and V, or SGLang's."""


class HCacheConfig(_Table):
    """The options of one server, immutable."""

    # store
    dirs: Annotated[tuple[_Absolute, ...], pydantic.AfterValidator(_once)] = Field(
        default_factory=default_dirs, validate_default=True, strict=False
    )
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
        | Annotated[PartitionOption, pydantic.Tag("layers")],
        pydantic.Discriminator(lambda value: "auto" if value == "auto" else "layers"),
    ] = "auto"
    profile: _Absolute | None = None
    codec: Literal["auto", "none", "exp3", "exp4", "int8", "krul"] = "auto"
    krul: KrulOption = KrulOption()
    # checks
    check_every_pages: int = Field(default=64, ge=0)
    sglang: Literal["checked", "tested"] = "checked"
    # restore and recompute
    min_gain: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    restore: Literal["auto", "layerwise"] = "auto"
    recompute: Literal["auto", "never"] = "auto"
    recompute_ms: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    # sharing
    shared: SharedOption | None = None

    @pydantic.model_validator(mode="after")
    def _together(self) -> HCacheConfig:
        """Raise ValueError for options that contradict each other."""
        asked = self.partition if isinstance(self.partition, PartitionOption) else PartitionOption()
        no_kv = self.mode in ("hidden", "plain") or asked.hidden or asked.recompute
        if self.codec == "krul" and no_kv:
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
    options: object, source: str, inherited: Mapping[str, object] | None = None
) -> HCacheConfig:
    """Build the configuration from the table ``options``; a ConfigError names all wrong options.
    ``source``: origin of the table, for messages. ``inherited`` options replace the defaults: those
    of ``HCACHE_CONFIG``, or those of a running server, which cannot be wrong."""
    given, inherited = _mapping(options, source), inherited or {}
    try:
        return HCacheConfig.model_validate({**inherited, **given})
    except ValidationError as error:
        from_variable = inherited.keys() - given.keys()
        problems = [
            _explain(one, CONFIG_VARIABLE if from_variable.intersection(one["loc"][:1]) else source)
            for one in error.errors()
        ]
        raise ConfigError("; ".join(problems)) from None


def _mapping(options: object, source: str) -> Mapping[str, object]:
    """``options`` if it is a table of options (None: empty); otherwise raises ConfigError."""
    if options is not None and not isinstance(options, Mapping):
        right = 'must be a table of options, such as {"dirs": ["/mnt/ssd0/hcache"]}'
        raise ConfigError(f"{source}: {right}, not a {type(options).__name__}")
    if outside := [repr(key) for key in (*OUR_KEYS, *_SGLANG_KEYS) if key in (options or {})]:
        where = "in SGLang's extra config, outside of the table 'hcache', which has the options"
        raise ConfigError(f"{source}: {', '.join(outside)} must stand {where}")
    return options or {}


def check_extra_config(extra: Mapping[str, Any]) -> None:
    """Raise ConfigError if SGLang's extra config has a key that neither SGLang nor we know, a value
    that SGLang does not take, or an ``interface_v1`` other than 1."""
    for key, value in extra.items():
        if not isinstance(value, _SGLANG_KEYS.get(key, object)):
            right = " or ".join(kind.__name__ for kind in _SGLANG_KEYS[key])
            raise ConfigError(f"extra config: {key!r} is {value!r}; it must be of type {right}")
        if key not in (known := (*OUR_KEYS, *_SGLANG_KEYS)):
            if key in HCacheConfig.model_fields:
                hint = f'it belongs under the key \'hcache\': {{"hcache": {{"{key}": ...}}}}'
            else:
                hint = nearest(str(key), known, "known: ")
            raise ConfigError(f"extra config: unknown key {key!r}; {hint}")
    if extra.get("interface_v1") != 1:
        raise ConfigError(
            f"extra config: 'interface_v1' is {extra.get('interface_v1')!r}; it must be 1, so that "
            "SGLang hands over pages without copying them"
        )


def start_config(extra: Mapping[str, Any] | None) -> HCacheConfig:
    """Options at a server's start: ``extra`` (None if L3 is not ours) over the environment."""
    environment = options_from_environment()
    if extra is None:
        return parse_config(environment, CONFIG_VARIABLE)
    check_extra_config(extra)
    return parse_config(extra.get("hcache"), "hcache", environment)


def is_enabled(environ: Mapping[str, str] = os.environ) -> bool:
    """True if ``HCACHE_ENABLE`` asks for us without our L3; ConfigError unless it is 0 or 1. Empty
    is as not set, because docker compose has no other word for it."""
    enabled = environ.get(ENABLE_VARIABLE) or "0"
    if enabled not in ("0", "1"):
        raise ConfigError(f"{ENABLE_VARIABLE} is {enabled!r}; it must be 0 or 1")
    return enabled == "1"


def options_from_environment(environ: Mapping[str, str] = os.environ) -> Mapping[str, object]:
    """The table of ``HCACHE_CONFIG``, empty without it; raises ConfigError."""
    text = environ.get(CONFIG_VARIABLE)
    return _mapping(load_table(text, CONFIG_VARIABLE) if text else None, CONFIG_VARIABLE)


_PARSERS: dict[str, Callable[[str], object]] = {
    ".json": json.loads,
    ".toml": tomllib.loads,
    ".yaml": yaml.safe_load,
    ".yml": yaml.safe_load,
}


def load_table(text: str, source: str) -> object:
    """Parse ``text``: JSON, or ``@FILE``, by the end of its name as SGLang does. Raises a
    ConfigError with ``source`` that quotes nothing of the text, which may have secrets."""
    path, end, wrong = None, ".json", f"{source}: neither JSON nor @FILE"
    if text.startswith("@"):
        path = Path(text[1:])
        end, wrong = path.suffix.lower(), f"{source}: cannot read {str(path)!r}"
        if end not in _PARSERS:
            raise ConfigError(f"{wrong}: its name must end in {', '.join(_PARSERS)}")
    try:
        return _PARSERS[end](text if path is None else path.read_text(encoding="utf-8"))
    except OSError as error:
        why = error.strerror
    except RecursionError:
        why = "it is nested too deeply"
    except yaml.YAMLError as error:  # its message quotes the line
        mark = getattr(error, "problem_mark", None)
        why = f"wrong at line {mark.line + 1} column {mark.column + 1}" if mark else "no YAML"
    except ValueError as error:  # also of a name with NUL, of another encoding, of huge numbers
        why = str(error)
    raise ConfigError(f"{wrong}: {why}")


def nearest(name: str, known: Collection[str], what: str) -> str:
    """Hint for an unknown ``name``: the most similar of ``known``, otherwise all of them."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"{what}{', '.join(known)}"


def _explain(detail: ErrorDetails, source: str) -> str:
    """The message for pydantic's error. It has no value of ``shared``, or of an unknown option."""
    path = [str(part) for part in detail["loc"] if part != "layers"]  # the tag of a partition
    key = ".".join(path)
    if detail["type"] == "extra_forbidden":
        *table, name = path
        known = (_TABLES[table[0]] if table else HCacheConfig).model_fields
        return f"{source}: unknown option {key!r}; {nearest(name, known, 'the options are ')}"
    message = detail["msg"].removeprefix("Value error, ").replace("Input should", "must")
    if detail["type"] in ("model_type", "tuple_type") and key in _RIGHT:
        message = f"must be {_RIGHT[key]}"
    if not key:  # about several options; the message names them
        return f"{source}: {message}"
    value = "" if path[0] == "shared" else f" is {detail['input']!r}"
    return f"{source}: option {key!r}{value}: {message}"
