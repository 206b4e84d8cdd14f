"""Options: what is accepted, and what the messages say."""

import math
from pathlib import Path

import pytest

from hcache_backend.config import (
    FIXED_AT_START,
    ConfigError,
    HCacheConfig,
    config_from_environment,
    default_dirs,
    is_enabled,
    parse_config,
)

FILE = {"backend": "file"}


def test_defaults_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert parse_config(None, "hcache") == HCacheConfig()
    assert parse_config({}, "hcache").dirs == (tmp_path / "hcache-backend" / "pages",)
    assert default_dirs()[0].is_absolute()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("500000000000", 5 * 10**11),
        ("500,000,000,000", 5 * 10**11),  # as our own messages print it
        ("4,294,967,296", 1 << 32),
        ("500GB", 5 * 10**11),
        ("500g", 5 * 10**11),
        ("500Gi", 500 << 30),  # Kubernetes
        (" 4 GiB ", 4 << 30),
        ("1.5TB", 15 * 10**11),
        *((text, None) for text in ("500.000.000.000", "1,5TB", "1,00", "1.500", "80%", "ib", "")),
        *((text, None) for text in ("500GB per disk", "1e12", "-5", "5 5", "0x10", "much")),
    ],
)
def test_a_size_is_understood_as_a_whole_or_refused(text: str, size: int | None) -> None:
    if size is not None:
        assert parse_config({"quota_bytes": text}, "hcache").quota_bytes == size
        return
    with pytest.raises(ConfigError, match=r"option 'quota_bytes' is .* must be a number of bytes"):
        parse_config({"quota_bytes": text}, "hcache")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "hcache: must be a table of options"),
        ({"dir": ["/a"]}, "hcache: unknown option 'dir' (value ['/a']); did you mean 'dirs'?"),
        ({"zzz": 1}, "unknown option 'zzz' (value 1); the options are dirs, quota_bytes"),
        ({"dirs": []}, "option 'dirs' is []: must be a list of at least one folder"),
        ({"dirs": [1]}, "every folder must be a path, not 1"),
        ({"dirs": ["a/b"]}, "every folder must be an absolute path, not 'a/b'"),
        ({"dirs": ["/a", "/a"]}, "every folder may be named once only"),
        ({"mode": "gpu"}, "option 'mode' is 'gpu': must be 'auto', 'hidden', 'kv' or 'plain'"),
        ({"partition": "kv"}, 'must be "auto" or numbers of layers, such as {"recompute": 1'),
        ({"partition": {"hiden": 1}}, "'partition.hiden' (value 1); did you mean 'hidden'?"),
        ({"partition": {"kv": -1}}, "'partition.kv' is -1: must be greater than or equal to 0"),
        ({"profile": "a.json"}, "must be the absolute path of a file that hcache profile wrote"),
        ({"check_every_pages": "64"}, "option 'check_every_pages' is '64': must be a"),
        ({"check_every_pages": True}, "option 'check_every_pages' is True: must be a"),
        ({"check_every_pages": -1}, "must be greater than or equal to 0"),
        ({"krul": 0.5}, 'must be a table, such as {"ratio": 0.5, "error": 0.3}'),
        ({"krul": {"ratio": 0}}, "option 'krul.ratio' is 0: must be greater than 0"),
        ({"krul": {"gama": 1.0}}, "unknown option 'krul.gama' (value 1.0); did you mean 'gamma'?"),
        ({"krul": {"error": -1}}, "option 'krul.error' is -1: must be greater than or equal"),
        ({"codec": "krul", "mode": "hidden"}, "option 'codec' is 'krul': options 'mode' and 'par"),
        ({"codec": "krul", "mode": "plain"}, "K and V of all layers be stored in own pages"),
        ({"codec": "krul", "partition": {"hidden": 2}}, "option 'codec' is 'krul': options 'mode'"),
        ({"krul": {"distance": "output"}}, "unknown option 'krul.distance' (value 'output'); the "),
        ({"shared": "mooncake"}, 'must be a table, such as {"backend": "mooncake", "config"'),
        ({"shared": {}}, "option 'shared.backend' is {}: Field required"),
        ({"shared": {"backend": "s3"}}, "is 's3': must be 'file', 'mooncake' or 'nixl'"),
        ({"shared": FILE | {"read_second": 1}}, "(value 1); did you mean 'read_seconds'?"),
        ({"shared": FILE | {"read_seconds": 0}}, "'shared.read_seconds' is 0: must be greater"),
        ({"shared": FILE | {"read_seconds": math.inf}}, "is inf: must be a finite number"),
        ({"pages": "plain"}, "unknown option 'pages' (value 'plain')"),
    ],
)
def test_a_wrong_option_is_named_with_its_value_and_what_would_be_right(
    options: object, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(options, "hcache")
    assert message in str(error.value)


def test_every_wrong_option_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)'mode'.*'check_every_pages'"):
        parse_config({"mode": "x", "check_every_pages": -1}, "hcache")


def test_pairs_of_layers_are_numbers() -> None:
    table = {"codec": "krul", "mode": "kv", "krul": {"pairs": [[0, 2], [1, 3]]}}
    assert parse_config(table, "test").krul.pairs == ((0, 2), (1, 3))


def test_options_that_are_not_set_are_inherited(tmp_path: Path) -> None:
    server = {"mode": "hidden", "partition": {"hidden": 4}, "quota_bytes": 5, "io_threads": 2}
    running = parse_config({"dirs": [str(tmp_path)], **server}, "start")
    assert parse_config(None, "hcache", running) == running
    changed = parse_config({"quota_bytes": 6}, "hcache", running)
    assert changed == running.model_copy(update={"quota_bytes": 6})
    with pytest.raises(ConfigError, match="'codec' is 'krul': options 'mode' and 'partition' must"):
        parse_config({"codec": "krul"}, "hcache", running)


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


def test_the_environment_enables_and_configures(tmp_path: Path) -> None:
    assert not is_enabled({})
    assert not is_enabled({"HCACHE_ENABLE": "0"})
    assert is_enabled({"HCACHE_ENABLE": "1"})
    assert config_from_environment({}) == HCacheConfig()
    table = tmp_path / "options.toml"
    table.write_text('mode = "kv"\n')
    for text in ('{"mode": "kv"}', f"@{table}"):
        assert config_from_environment({"HCACHE_CONFIG": text}).mode == "kv"
    table.write_text("dirs = [")
    with pytest.raises(ConfigError, match="is not TOML"):
        config_from_environment({"HCACHE_CONFIG": f"@{table}"})


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"HCACHE_ENABLE": "yes"}, "HCACHE_ENABLE is 'yes'; it must be 0 or 1"),
        ({"HCACHE_CONFIG": "{"}, "neither JSON nor @file.toml"),
        ({"HCACHE_CONFIG": "@/no/such.toml"}, "cannot read /no/such.toml"),
        ({"HCACHE_CONFIG": "[1]"}, "HCACHE_CONFIG: must be a table"),
        ({"HCACHE_CONFIG": '{"mod": 1}'}, "did you mean 'mode'?"),
    ],
)
def test_a_wrong_environment_is_explained(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        is_enabled(environment)
        config_from_environment(environment)
    assert message in str(error.value)
