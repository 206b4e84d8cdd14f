"""Options: what is accepted, and what the messages say."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from hcache_backend.config import (
    FIXED_AT_START,
    ConfigError,
    HCacheConfig,
    SharedOption,
    check_extra_config,
    default_dirs,
    is_enabled,
    load_table,
    options_from_environment,
    parse_config,
    start_config,
)

FILE = {"backend": "file"}


def test_defaults_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert parse_config(None, "hcache") == HCacheConfig()
    assert parse_config({}, "hcache").dirs == (tmp_path / "hcache-backend" / "pages",)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")  # the XDG rule: relative ones are ignored
    monkeypatch.setenv("HOME", "/home/me")
    assert parse_config({}, "hcache").dirs == (Path("/home/me/.cache/hcache-backend/pages"),)
    assert default_dirs() == ["~/.cache/hcache-backend/pages"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "hcache: must be a table of options"),
        ({"dir": ["/a"]}, "hcache: unknown option 'dir'; did you mean 'dirs'?"),
        ({"zzz": 1}, "unknown option 'zzz'; the options are dirs, quota_bytes"),
        ({"dirs": []}, "option 'dirs' is []: must be a list of at least one folder"),
        ({"dirs": [1]}, "option 'dirs.0' is 1: must be an absolute path, not 1"),
        ({"dirs": "/a"}, "option 'dirs' is '/a': must be a list of at least one folder, such"),
        ({"dirs": ["/a", "a/b"]}, "option 'dirs.1' is 'a/b': must be an absolute path"),
        ({"dirs": ["/a", "/a"]}, "every folder may be named once only"),
        ({"mode": "gpu"}, "option 'mode' is 'gpu': must be 'auto', 'hidden', 'kv' or 'plain'"),
        ({"partition": "kv"}, 'must be "auto" or numbers of layers, such as {"recompute": 1'),
        ({"partition": {"hiden": 1}}, "'partition.hiden'; did you mean 'hidden'?"),
        ({"partition": {"kv": -1}}, "'partition.kv' is -1: must be greater than or equal to 0"),
        ({"profile": "a.json"}, "option 'profile' is 'a.json': must be an absolute path, not"),
        ({"check_every_pages": "64"}, "option 'check_every_pages' is '64': must be a"),
        ({"check_every_pages": True}, "option 'check_every_pages' is True: must be a"),
        ({"check_every_pages": -1}, "must be greater than or equal to 0"),
        ({"krul": 0.5}, 'must be a table, such as {"ratio": 0.5, "error": 0.3}'),
        ({"krul": {"ratio": 0}}, "option 'krul.ratio' is 0: must be greater than 0"),
        ({"krul": {"gama": 1.0}}, "unknown option 'krul.gama'; did you mean 'gamma'?"),
        ({"krul": {"error": -1}}, "option 'krul.error' is -1: must be greater than or equal"),
        ({"codec": "fp8"}, "'codec' is 'fp8': must be 'auto', 'none', 'exp3', 'exp4', 'int8' or "),
        ({"codec": "krul", "mode": "hidden"}, "option 'codec' is 'krul': options 'mode' and 'par"),
        ({"codec": "krul", "mode": "plain"}, "K and V of all layers be stored in own pages"),
        ({"codec": "krul", "partition": {"hidden": 2}}, "option 'codec' is 'krul': options 'mode'"),
        ({"krul": {"distance": "output"}}, "unknown option 'krul.distance'; the options are "),
        ({"shared": "mooncake"}, 'must be a table, such as {"backend": "mooncake", "config"'),
        ({"shared": {}}, "option 'shared.backend': Field required"),
        ({"shared": {"backend": "s3"}}, "'shared.backend': must be 'file', 'mooncake' or 'nixl'"),
        (
            {"shared": FILE | {"read_second": 1}},
            "'shared.read_second'; did you mean 'read_sec",
        ),
        ({"shared": FILE | {"read_seconds": 0}}, "'shared.read_seconds': must be greater"),
        (
            {"shared": FILE | {"read_seconds": math.inf}},
            "'shared.read_seconds': must be a finite",
        ),
        ({"pages": "plain"}, "unknown option 'pages'; the options are"),
    ],
)
def test_a_wrong_option_is_named_with_its_value_and_what_would_be_right(
    options: object, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(options, "hcache")
    assert message in str(error.value)


SIZES: list[tuple[object, int | None]] = [
    (5, 5),
    ("500000000000", 500_000_000_000),
    ("500,000,000,000", 500_000_000_000),  # as messages print them
    ("4,294,967,296 bytes", 1 << 32),
    ("760.0 KiB", 760 << 10),
    ("5 B", 5),
    (" 500GB ", 500_000_000_000),
    ("500gb", 500_000_000_000),
    ("500G", 500_000_000_000),
    ("500Gi", 500 << 30),  # Kubernetes
    ("1.5TB", 1_500_000_000_000),
    ("500.000.000.000", None),  # 500 to pydantic, and 10^11 to those who write so
    ("500.000", None),
    ("1,5TB", None),
    ("1,500GB", None),
    ("5,00", None),
    ("80%", None),
    ("500GB per disk", None),
    ("500 G B", None),
    ("500Gbit", None),
    ("1e12", None),
    ("-1GB", None),
    ("\u0663GB", None),  # a digit, but not one of ours
    ("9" * 400 + "GB", None),
    ("", None),
    (True, None),
]


@pytest.mark.parametrize(("written", "size"), SIZES)
@pytest.mark.parametrize("option", ["quota_bytes", "min_free_bytes"])
def test_a_size_is_what_was_meant_or_refused(
    option: str, written: object, size: int | None
) -> None:
    try:
        found = getattr(parse_config({option: written}, "hcache"), option)
    except ConfigError as error:
        assert str(error).startswith(f"hcache: option '{option}' is {written!r}: must be a")
        found = None
    assert found == size


@pytest.mark.parametrize("folder", ["~nobody-here/x", "/a\0b", "/a\ud800b", "", " ", "a", 5, None])
def test_a_folder_that_cannot_be_is_named(folder: object) -> None:
    wrong = f"option 'dirs.0' is {folder!r}: must be an absolute path"
    with pytest.raises(ConfigError) as error:
        parse_config({"dirs": [folder]}, "hcache")
    assert wrong in str(error.value) and "at least one" not in str(error.value)
    if folder:
        with pytest.raises(ConfigError, match=r"option 'profile' is .*: must be an absolute path"):
            parse_config({"profile": folder}, "hcache")


def test_only_who_names_no_folder_needs_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user of a container that no passwd has."""

    def unknown(self: Path) -> Path:
        if self.parts[:1] == ("~",):
            raise RuntimeError("Could not determine home directory.")
        return self

    monkeypatch.setattr(Path, "expanduser", unknown)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HCACHE_CONFIG", '{"mode": "kv"}')
    found = start_config({"interface_v1": 1, "hcache": {"dirs": ["/mnt/ssd0/hcache"]}})
    assert (found.dirs, found.mode) == ((Path("/mnt/ssd0/hcache"),), "kv")
    with pytest.raises(ConfigError, match=r"option 'dirs.0' is '~/.*: no home folder is known"):
        start_config({"interface_v1": 1})


SECRET = "s3cr3t"
LEAKS: dict[str, Callable[[], object]] = {
    "no backend": lambda: parse_config({"shared": {"config": {"key": SECRET}}}, "hcache"),
    "a text": lambda: parse_config({"shared": {**FILE, "config": f"key={SECRET}"}}, "hcache"),
    "a backend": lambda: parse_config({"shared": {"backend": SECRET}}, "hcache"),
    "a size": lambda: parse_config({"shared": {**FILE, "buffer_bytes": SECRET}}, "hcache"),
    "beside config": lambda: parse_config({"shared": {**FILE, "key": SECRET}}, "hcache"),
    "shared": lambda: parse_config({"shared": f"file,{SECRET}"}, "hcache"),
    "no table": lambda: parse_config(f"key={SECRET}", "hcache"),
    "an unknown option": lambda: parse_config({"key": SECRET}, "hcache"),
    "an unknown key": lambda: check_extra_config({"interface_v1": 1, "key": SECRET}),
    "JSON": lambda: load_table(f'{{"shared": {{"key": "{SECRET}"}},}}', "HCACHE_CONFIG"),
}


@pytest.mark.parametrize("leak", LEAKS)
def test_no_error_has_a_secret(leak: str) -> None:
    with pytest.raises(ConfigError) as error:
        LEAKS[leak]()
    assert SECRET not in str(error.value)


def test_keys_of_yaml_need_not_be_texts() -> None:
    with pytest.raises(ConfigError, match="extra config: unknown key 5; known: backend_name"):
        check_extra_config({"interface_v1": 1, 5: 1})


@pytest.mark.parametrize("end", ["toml", "json", "yaml"])
def test_no_error_has_a_line_of_a_file(end: str, tmp_path: Path) -> None:
    file = tmp_path / f"wrong.{end}"
    file.write_text(f"[shared]\nkey: [{SECRET}\n")
    with pytest.raises(ConfigError, match=r"line [123]") as error:
        load_table(f"@{file}", "HCACHE_CONFIG")
    assert SECRET not in str(error.value) and str(file) in str(error.value)


def test_the_options_of_a_shared_backend_are_not_printed() -> None:
    config = parse_config({"shared": {**FILE, "config": {"key": SECRET}}}, "hcache")
    assert isinstance(config.shared, SharedOption)
    assert config.shared.config.get_secret_value() == {"key": SECRET}
    shown = (repr(config), str(config), config.model_dump_json(), repr(config.model_dump()))
    assert not any(SECRET in text for text in shown)
    inherited = config.model_dump(exclude_unset=True)
    assert parse_config({"mode": "kv"}, "hcache", inherited).shared == config.shared


def test_every_wrong_option_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)'mode'.*'check_every_pages'"):
        parse_config({"mode": "x", "check_every_pages": -1}, "hcache")


def test_pairs_of_layers_are_numbers() -> None:
    table = {"codec": "krul", "mode": "kv", "krul": {"pairs": [[0, 2], [1, 3]]}}
    assert parse_config(table, "test").krul.pairs == ((0, 2), (1, 3))


def test_options_that_are_not_set_are_inherited(tmp_path: Path) -> None:
    server = {"mode": "hidden", "partition": {"hidden": 4}, "quota_bytes": 5, "io_threads": 2}
    running = parse_config({"dirs": [str(tmp_path)], **server}, "start")
    given = running.model_dump(exclude_unset=True)
    assert parse_config(None, "hcache", given) == running
    changed = parse_config({"quota_bytes": 6}, "hcache", given)
    assert changed == running.model_copy(update={"quota_bytes": 6})
    with pytest.raises(ConfigError, match="'codec' is 'krul': options 'mode' and 'partition' must"):
        parse_config({"codec": "krul"}, "hcache", given)
    with pytest.raises(ConfigError, match=r"HCACHE_CONFIG: option 'mode' .*hcache: option 'codec'"):
        parse_config({"codec": "gzip"}, "hcache", {"mode": "gpu"})


def test_the_options_are_few_and_an_attach_may_set_those_of_the_store_and_of_sharing() -> None:
    assert len(HCacheConfig.model_fields) <= 20
    assert HCacheConfig.model_fields.keys() > FIXED_AT_START
    assert HCacheConfig.model_fields.keys() - FIXED_AT_START == {
        *("dirs", "quota_bytes", "min_free_bytes", "durability", "io_threads", "reader"),
        *("min_gain", "events", "state_tokens", "shared"),
    }


def test_layers_that_are_never_recomputed_are_all_stored() -> None:
    parse_config({"recompute": "never", "partition": {"hidden": 4}}, "start")
    parse_config({"recompute": "auto", "partition": {"recompute": 1, "hidden": 3}}, "start")
    with pytest.raises(ConfigError, match=r"'never': option 'partition' must .* the first 1 "):
        parse_config({"recompute": "never", "partition": {"recompute": 1, "hidden": 3}}, "start")


def test_the_environment_enables_and_configures() -> None:
    assert not any(is_enabled(e) for e in ({}, {"HCACHE_ENABLE": "0"}, {"HCACHE_ENABLE": ""}))
    assert is_enabled({"HCACHE_ENABLE": "1"})
    assert options_from_environment({}) == options_from_environment({"HCACHE_CONFIG": ""}) == {}
    assert options_from_environment({"HCACHE_CONFIG": '{"mode": "kv"}'}) == {"mode": "kv"}


TABLES = {
    "json": json.dumps({"mode": "kv"}),
    "toml": 'mode = "kv"\r\n',
    "yaml": "mode: kv\n",
    "YML": "{mode: kv}",
}


@pytest.mark.parametrize("end", TABLES)
def test_a_file_is_read_by_the_end_of_its_name(end: str, tmp_path: Path) -> None:
    file = tmp_path / f"options.{end}"
    file.write_text(TABLES[end])
    assert load_table(f"@{file}", "HCACHE_CONFIG") == {"mode": "kv"}


FILES: list[tuple[str, bytes, str]] = [
    ("x.conf", b"{}", "its name must end in .json, .toml, .yaml, .yml"),
    ("x", b"{}", "its name must end in"),
    ("x.toml", b"dirs = [", "Invalid value (at end of document)"),
    ("x.toml", b"\xff\xfem\0", "'utf-8' codec can't decode byte 0xff"),
    ("x.toml", b"\xef\xbb\xbfmode = 'kv'", "Invalid statement (at line 1, column 1)"),
    ("x.json", b'\xef\xbb\xbf{"mode": "kv"}', "Unexpected UTF-8 BOM"),
    ("x.json", b"[" * 100_000, "it is nested too deeply"),
    ("x.toml", b"a=" + b"[" * 100_000, "it is nested too deeply"),
    ("x.yaml", b"[" * 2_000, "it is nested too deeply"),
    ("x.json", b"9" * 5_000, "Exceeds the limit (4300 digits)"),
    ("x.toml", b"a=" + b"9" * 5_000, "Exceeds the limit (4300 digits)"),
    ("x.yaml", b"a: b: c", "wrong at line 1 column 5"),
    ("x.yaml", b"a: \x07", "no YAML"),
    ("absent.json", b"", "No such file or directory"),
]


@pytest.mark.parametrize(("name", "content", "why"), FILES)
def test_a_file_that_cannot_be_read_is_named(
    name: str, content: bytes, why: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    if content:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load_table(f"@{file}", "HCACHE_CONFIG")
    assert str(error.value).startswith(f"HCACHE_CONFIG: cannot read '{file}': {why}")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"HCACHE_ENABLE": "yes"}, "HCACHE_ENABLE is 'yes'; it must be 0 or 1"),
        ({"HCACHE_CONFIG": "{"}, "HCACHE_CONFIG: neither JSON nor @FILE: Expecting property name"),
        ({"HCACHE_CONFIG": "[" * 100_000}, "neither JSON nor @FILE: it is nested too deeply"),
        ({"HCACHE_CONFIG": "9" * 5_000}, "neither JSON nor @FILE: Exceeds the limit"),
        ({"HCACHE_CONFIG": "@/a\0b.toml"}, "cannot read '/a\\x00b.toml': embedded null byte"),
        ({"HCACHE_CONFIG": "[1]"}, "HCACHE_CONFIG: must be a table of options, such as"),
        ({"HCACHE_CONFIG": '{"mod": 1}'}, "HCACHE_CONFIG: unknown option 'mod'; did you mean 'mo"),
    ],
)
def test_a_wrong_environment_is_explained(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        is_enabled(environment)
        parse_config({}, "hcache", options_from_environment(environment))
    assert message in str(error.value)
