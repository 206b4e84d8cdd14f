"""What a server's start, or an attach, asks of the options of our L3."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pytest import MonkeyPatch

from hcache_backend import HCacheStorage
from hcache_backend.config import (
    FIXED_AT_START,
    ConfigError,
    HCacheConfig,
    check_extra_config,
    load_table,
    parse_config,
)
from hcache_backend.sglang.arguments import storage_extra_config
from hcache_backend.sglang.runtime import Runtime
from hcache_backend.start.attach import join
from hcache_backend.tiers.shared_backend import make_backend
from tests.engine.in_process.storage_config import storage_config

NOT_HIDDEN = r"'hidden' but this server runs in kv mode \({}"


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ({"attn_dp_size": 2}, "--attn-dp-size"),
        ({"enable_dp_attention": True, "dp_size": 2}, "--attn-dp-size"),
        # Keys of what it has in memory do not tell adapters from requests that name them.
        ({"enable_lora": True}, "--enable-lora"),
    ],
)
def test_a_plain_server_of_a_kind_has_to_be_started_for_us(
    arguments: dict[str, Any],
    option: str,
    tmp_path: Path,
    runtime: Runtime,
    monkeypatch: MonkeyPatch,
) -> None:
    runtime.options.config, runtime.store, runtime.weights.present = None, None, None
    vars(runtime.runner.server_args).update(arguments)
    monkeypatch.setattr("hcache_backend.start.attach.resolved", lambda args: args)
    with pytest.raises(ConfigError, match=f"HCACHE_ENABLE=1; with {option} it has to"):
        HCacheStorage(storage_config(tmp_path))


@pytest.mark.parametrize(
    "key",
    [
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "prefetch_timeout_max",
        "hicache_storage_pass_prefix_keys",
        "tp_lcm_size",
    ],
)
def test_keys_that_some_version_of_sglang_takes_out_itself_are_let_through(
    key: str, tmp_path: Path, runtime: Runtime
) -> None:
    config = storage_config(tmp_path)
    assert config.extra_config is not None
    config.extra_config[key] = True  # also a number to Python
    HCacheStorage(config).close()
    config.extra_config[key[:-1]] = config.extra_config.pop(key)
    with pytest.raises(ConfigError, match=f"unknown key '{key[:-1]}'.*did you mean '{key}'"):
        HCacheStorage(config)


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path, runtime: Runtime) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match=r"option 'dirs' is \['.*file/sub'\]: .*directory: .*'$"):
        HCacheStorage(storage_config(blocked / "sub"))
    with pytest.raises(ConfigError, match=r"it is not empty and not a page store's .*'$"):
        HCacheStorage(storage_config(tmp_path))


def test_an_attach_with_pages_of_one_token_is_warned_of(
    tmp_path: Path, runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings() -> list[str]:
        caplog.clear()
        HCacheStorage(storage_config(tmp_path)).close()
        return [line for line in caplog.messages if "--page-size 64" in line]

    assert warnings() == []
    runtime.runner.server_args.page_size = None  # it was not given
    assert len(warnings()) == 1


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_folder_that_cannot_be_written_is_to_be_one_that_can(
    number: int, tmp_path: Path, runtime: Runtime, monkeypatch: MonkeyPatch
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise OSError(number, os.strerror(number), str(tmp_path))

    monkeypatch.setattr("hcache_backend.store.disk.Folder", refuse)
    with pytest.raises(ConfigError, match="every folder must be one that this user can create and"):
        HCacheStorage(storage_config(tmp_path))


class TestAnAttach:
    """To a server that was started with options; ``joined`` is what the storage class gets."""

    @pytest.fixture
    def running(self, runtime: Runtime, tmp_path: Path) -> Runtime:
        options: dict[str, Any] = {"mode": "hidden", "codec": "exp4", "min_gain": 0}
        options["dirs"] = [str(tmp_path / "start")]
        runtime.options.config = parse_config(options, "start")
        runtime.pages.kind = "hidden"
        return runtime

    def joined(self, **options: Any) -> HCacheConfig:
        config = storage_config(Path())
        assert config.extra_config is not None
        config.extra_config["hcache"] = options
        joined = join(config, make_backend)
        joined.store.close()
        return joined.config

    def test_inherits_every_option_that_it_does_not_set(self, running: Runtime) -> None:
        assert self.joined() == running.options.config
        assert (
            self.joined(mode="hidden", codec="exp4", check_every_pages=64) == running.options.config
        )

    def test_chooses_the_options_of_the_store(self, running: Runtime, tmp_path: Path) -> None:
        other = tmp_path / "other"
        config = self.joined(dirs=[str(other)], quota_bytes=6, durability="none")
        assert (config.dirs, config.quota_bytes, config.durability) == ((other,), 6, "none")
        assert (config.mode, config.codec) == ("hidden", "exp4")
        assert self.joined() == running.options.config, (
            "an attach does not change what the server has"
        )

    def test_every_option_is_followed_or_refused(self, running: Runtime) -> None:
        of_the_store = HCacheConfig.model_fields.keys() - FIXED_AT_START
        assert "dirs" in of_the_store
        others: dict[str, object] = {
            "mode": "kv",
            "partition": {"hidden": 2},
            "profile": "/tmp/profile.json",
            "codec": "none",
            "krul": {"gamma": 0.25},
            "check_every_pages": 1,
            "sglang": "tested",
            "restore": "layerwise",
            "recompute": "never",
            "recompute_ms": 5.0,
        }
        assert others.keys() == FIXED_AT_START
        for name, value in others.items():
            with pytest.raises(ConfigError, match=f"option '{name}' is .*change at a restart"):
                self.joined(**{name: value})

    def test_may_ask_for_what_auto_chose(self, running: Runtime, tmp_path: Path) -> None:
        running.options.config = parse_config(
            {"dirs": [str(tmp_path / "start")], "min_gain": 0}, "start"
        )
        running.pages.codec = "exp4"
        for options in ({"mode": "auto"}, {"mode": "hidden"}, {"codec": "auto"}, {"codec": "exp4"}):
            self.joined(**options)
        for codec in ("none", "int8"):
            with pytest.raises(ConfigError, match="this server was started with 'auto'"):
                self.joined(codec=codec)
        running.pages.kind, running.pages.reason = "kv", "no room"
        for mode in ("auto", "kv"):
            self.joined(mode=mode)
        with pytest.raises(ConfigError, match=NOT_HIDDEN.format("no room")):
            self.joined(mode="hidden")

    def test_may_not_ask_for_a_mode_that_the_server_could_not_have(self, running: Runtime) -> None:
        running.pages.kind, running.pages.reason = "kv", "no room"
        self.joined()
        with pytest.raises(ConfigError, match=NOT_HIDDEN.format("no room")):
            self.joined(mode="hidden")

    def test_may_ask_for_the_plain_pages_that_the_server_has(self, running: Runtime) -> None:
        with pytest.raises(ConfigError, match="'plain' but this server runs in hidden mode"):
            self.joined(mode="plain")
        assert running.options.config is not None
        running.options.config = running.options.config.model_copy(update={"mode": "auto"})
        running.pages.use_plain_pages("the KV pool is another one")
        for mode in ("kv", "plain"):
            self.joined(mode=mode)
        with pytest.raises(ConfigError, match=NOT_HIDDEN.format("the KV")):
            self.joined(mode="hidden")

    def test_of_a_server_that_was_started_without_us_may_set_what_it_has(
        self, runtime: Runtime, tmp_path: Path
    ) -> None:
        base = {"dirs": [str(tmp_path)], "min_gain": 0}
        for options in ({"mode": "kv"}, {"mode": "auto"}, {"mode": "plain"}, {"codec": "none"}):
            config = self.joined(**base, **options)
            assert config == parse_config({**base, **options}, "test")
        with pytest.raises(ConfigError, match=r"'hidden' but .* without HCACHE_ENABLE=1"):
            self.joined(dirs=[str(tmp_path)], mode="hidden")


TABLE = (
    '{"backend_name": "hcache", "module_path": "hcache_backend", "class_name": "HCacheStorage", '
    '"interface_v1": 1%s, "hcache": {"dirs": ["/mnt/ssd0/hcache"]}}'
)
FILES = {
    "a.json": TABLE % "",
    "a.JSON": TABLE % "",
    "a.yaml": TABLE % "",  # YAML has JSON in it
    "a.yml": "interface_v1: 1\nhcache:\n  dirs: [/mnt/ssd0/hcache]\n",
    "a.TOML": 'interface_v1 = 1\n[hcache]\ndirs = ["/mnt/ssd0/hcache"]\n',
    "a.conf": TABLE % "",
    "a": TABLE % "",
    "byte order mark.json": "\ufeff" + TABLE % "",
    "byte order mark.toml": "\ufeffinterface_v1 = 1\n",
    "byte order mark.yaml": "\ufeff" + TABLE % "",
    "comma.json": TABLE % "," + ",",
    "threshold.json": TABLE % ', "prefetch_threshold": "64"',
    "threshold true.json": TABLE % ', "prefetch_threshold": true',
    "threshold float.json": TABLE % ', "prefetch_threshold": 64.0',
    "base.json": TABLE % ', "prefetch_timeout_base": "2s"',
    "base int.json": TABLE % ', "prefetch_timeout_base": 2',
    "per token.json": TABLE % ', "prefetch_timeout_per_ki_token": null',
    "keys.json": TABLE % ', "hicache_storage_pass_prefix_keys": 1',
}


@pytest.mark.parametrize("name", FILES)
def test_hcache_config_reads_the_files_that_sglang_reads(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(FILES[name], encoding="utf-8")
    args = SimpleNamespace(hicache_storage_backend_extra_config=f"@{file}")

    def refused(read: Callable[[], object]) -> bool:
        try:
            read()
        except ValueError:
            return True
        return False

    theirs = refused(lambda: storage_extra_config(args))
    assert theirs == refused(lambda: check_extra_config(load_table(f"@{file}", "config")))
