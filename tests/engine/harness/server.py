"""A real SGLang server in a process of its own, with the options that our tests vary."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import requests

from tests.cpu_engine.hcache_cpu_engine import cpu_engine_env, warm_extensions

ADMIN_KEY = "test-admin"
POLL_S = 0.05
_running: set[Server] = set()


class ServerError(RuntimeError):
    """The server died, or did not do in time what was waited for; carries the end of its log."""


@dataclass(frozen=True)
class CachedTokens:
    """Where a prompt's cached tokens came from (`meta_info.cached_tokens_details`)."""

    device: int
    host: int
    storage: int


@dataclass(frozen=True)
class Reply:
    """One answer of `/generate`."""

    output_ids: list[int]
    meta_info: dict[str, Any]

    @property
    def cached(self) -> CachedTokens:
        details = self.meta_info.get("cached_tokens_details") or {}
        return CachedTokens(
            details.get("device", 0), details.get("host", 0), details.get("storage", 0)
        )

    @property
    def top2(self) -> list[tuple[float, float]]:
        """The two best log-probabilities at each token; needs `generate(..., logprobs=True)`."""
        return [(best[0], second[0]) for best, second in self.meta_info["output_top_logprobs"]]


@dataclass
class ServerOptions:
    """What a test chooses. Defaults: HiCache with a small pool on the CPU, no L3."""

    model: Path
    log: Path
    cache: Literal["hicache", "radix", "none"] = "hicache"
    dtype: str = "float32"
    page_size: int = 64
    max_total_tokens: int = 4096
    chunked_prefill_size: int | None = None
    write_policy: str = "write_through"
    prefetch_policy: str = "wait_complete"
    hicache_ratio: float = 2.0
    hicache_size_gb: int | None = None
    mem_layout: str = "page_first"
    io_backend: str = "kernel"
    storage_backend: str | None = None
    extra_config: Mapping[str, Any] | str | None = None
    tp: int = 1
    extra_args: Sequence[str] = ()
    extra_env: Mapping[str, str] = field(default_factory=dict)
    fork: bool = True
    """Fork SGLang's worker processes instead of spawning them: half the start-up time."""
    ready_timeout_s: float = 120.0

    def command(self, port: int) -> list[str]:
        args: list[Any] = [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", self.model),
            *("--host", "127.0.0.1", "--port", port, "--admin-api-key", ADMIN_KEY),
            *("--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph"),
            *("--disable-overlap-schedule", "--grammar-backend", "none", "--skip-tokenizer-init"),
            *("--mem-fraction-static", 0.1, "--max-total-tokens", self.max_total_tokens),
            *("--dtype", self.dtype, "--page-size", self.page_size, "--tp", self.tp),
            *("--skip-server-warmup", "--enable-cache-report"),
        ]
        if self.chunked_prefill_size is not None:
            args += ["--chunked-prefill-size", self.chunked_prefill_size]
        if self.cache == "none":
            args += ["--disable-radix-cache"]
        if self.cache == "hicache":
            args += self._hicache_args()
        return [str(a) for a in [*args, *self.extra_args]]

    def _hicache_args(self) -> list[Any]:
        args: list[Any] = [
            *("--enable-hierarchical-cache", "--hicache-ratio", self.hicache_ratio),
            *("--hicache-write-policy", self.write_policy),
            *("--hicache-mem-layout", self.mem_layout, "--hicache-io-backend", self.io_backend),
            *("--hicache-storage-prefetch-policy", self.prefetch_policy),
        ]
        if self.hicache_size_gb is not None:
            args += ["--hicache-size", self.hicache_size_gb]
        if self.storage_backend is not None:
            args += ["--hicache-storage-backend", self.storage_backend]
        if self.extra_config is not None:
            args += ["--hicache-storage-backend-extra-config", as_text(self.extra_config)]
        return args

    def environment(self) -> dict[str, str]:
        env = {**os.environ, **cpu_engine_env(), "HCACHE_CPU_ENGINE_FORK": str(int(self.fork))}
        env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"  # else readiness costs a generation
        if self.tp > 1:
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(r) for r in range(self.tp))
        return {**env, **self.extra_env}


def as_text(config: Mapping[str, Any] | str) -> str:
    """JSON of a mapping; a string (`@file.toml`) as it is."""
    return config if isinstance(config, str) else json.dumps(config)


class Server:
    """`with Server(ServerOptions(...)) as server:` - ready to answer when the block is entered.

    The server's processes form one group, which is killed on exit from the block and when this
    interpreter ends. There is nothing to lose in a kill: L3 must survive one by design.
    """

    def __init__(self, options: ServerOptions):
        self.options = options
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.startup_s = 0.0

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.kill()

    # -- life

    def start(self) -> None:
        """Start and wait until requests are answered; raises ServerError with the log's end."""
        warm_extensions()
        begin = time.monotonic()
        self.launch()
        try:
            self._wait_ready(begin + self.options.ready_timeout_s)
        except BaseException:
            self.kill()
            raise
        self.startup_s = time.monotonic() - begin

    def launch(self) -> None:
        """Start the process without waiting for it (a server that is expected to refuse)."""
        self.port = _free_port()
        self.options.log.parent.mkdir(parents=True, exist_ok=True)
        with self.options.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.options.command(self.port),
                env=self.options.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        _running.add(self)

    def wait_exit(self, timeout: float) -> int:
        """Exit status of a server that was launched in order to fail."""
        assert self.process is not None
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise self._error(f"still running after {timeout:.0f} s") from None
        finally:
            self.kill()

    def kill(self) -> None:
        """SIGKILL to the whole process group; returns when the processes are gone."""
        _running.discard(self)
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        _wait_group_gone(self.process.pid)
        self.process = None

    def stop(self, timeout: float = 10.0) -> None:
        """SIGTERM, as an operator stops a server; what is left after `timeout` is killed."""
        if self.process is not None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout)
        self.kill()

    def _wait_ready(self, deadline: float) -> None:
        assert self.process is not None
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise self._error(f"exited with {self.process.returncode} while starting")
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            time.sleep(POLL_S)
        raise self._error(f"not ready after {self.options.ready_timeout_s:.0f} s")

    # -- requests

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def generate(
        self,
        input_ids: Sequence[int],
        max_new_tokens: int,
        *,
        logprobs: bool = False,
        timeout: float = 300.0,
        **sampling: Any,
    ) -> Reply:
        """One request, greedy unless `sampling` says otherwise; never stops at a token."""
        body: dict[str, Any] = {
            "input_ids": list(input_ids),
            "sampling_params": {
                "temperature": 0.0,
                "max_new_tokens": max_new_tokens,
                "ignore_eos": True,
                **sampling,
            },
        }
        if logprobs:
            body |= {"return_logprob": True, "top_logprobs_num": 2}
        answer = self._request("POST", "/generate", json=body, timeout=timeout)
        if answer.status_code != 200:
            raise self._error(f"/generate answered {answer.status_code}: {answer.text}")
        reply = answer.json()
        return Reply(reply["output_ids"], reply["meta_info"])

    def generate_many(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, **options: Any
    ) -> list[Reply]:
        """All prompts at once, one thread each; replies in the order of `prompts`."""
        with ThreadPoolExecutor(max_workers=len(prompts)) as pool:
            return list(
                pool.map(lambda prompt: self.generate(prompt, max_new_tokens, **options), prompts)
            )

    def flush_cache(self, timeout: float = 30.0) -> None:
        """Empty device and host caches once the server is idle; L3 is not touched.

        SGLang counts write-through and L3 backups in flight as work, so everything that was to be
        backed up is in L3 when this returns.
        """
        answer = self._admin("POST", "/flush_cache", params={"timeout": timeout})
        if answer.status_code != 200:
            raise self._error(f"/flush_cache answered {answer.status_code}: {answer.text}")

    def wait_backed_up(self, timeout: float = 30.0) -> None:
        """Wait until the write-through to host and L3 is finished, without flushing anything.

        The scheduler itself is asked: it refuses an attach while requests, write-throughs, loads,
        prefetches or L3 backups are in flight, and one with an unknown policy in any case and
        without side effects. The reason that it gives tells which it was.
        """

        def idle() -> bool:
            answer = self.attach_storage("file", hicache_storage_prefetch_policy="idle-probe")
            if "idle-probe" not in answer.text and "not idle" not in answer.text:
                raise self._error(f"idle probe answered {answer.status_code}: {answer.text}")
            return "not idle" not in answer.text

        self._until(idle, timeout, "backups to finish")

    def update_weights_from_disk(self, model: Path) -> None:
        answer = self._admin("POST", "/update_weights_from_disk", json={"model_path": str(model)})
        if answer.status_code != 200 or not answer.json()["success"]:
            raise self._error(f"update_weights_from_disk: {answer.status_code} {answer.text}")

    def _request(self, method: str, path: str, **options: Any) -> requests.Response:
        try:
            return requests.request(method, self.url + path, **options)
        except requests.RequestException as error:
            raise self._error(f"{method} {path}: {error}") from error

    # -- storage administration (answers are returned: tests look at refusals too)

    def attach_storage(
        self, backend: str, extra_config: Mapping[str, Any] | str | None = None, **body: Any
    ) -> requests.Response:
        """PUT /hicache/storage-backend. Policies go in `body`, by SGLang's names."""
        body["hicache_storage_backend"] = backend
        if extra_config is not None:
            body["hicache_storage_backend_extra_config_json"] = as_text(extra_config)
        return self._admin("PUT", "/hicache/storage-backend", json=body)

    def storage_info(self) -> requests.Response:
        return self._admin("GET", "/hicache/storage-backend")

    def detach_storage(self, timeout: float = 30.0) -> None:
        """DELETE /hicache/storage-backend, repeated while it answers 400 (just after a request)."""
        self._until(
            lambda: self._admin("DELETE", "/hicache/storage-backend").status_code == 200,
            timeout,
            "detach",
        )

    def clear_storage(self) -> requests.Response:
        return self._admin("POST", "/hicache/storage-backend/clear")

    def _admin(self, method: str, path: str, **options: Any) -> requests.Response:
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        return self._request(method, path, headers=headers, timeout=120, **options)

    # -- waiting

    def log_text(self) -> str:
        return self.options.log.read_text(errors="replace")

    def wait_for_log(self, pattern: str, timeout: float = 30.0) -> re.Match[str]:
        """First match of the regular expression `pattern` in the log, waiting for it."""
        found: list[re.Match[str]] = []

        def look() -> bool:
            if match := re.search(pattern, self.log_text()):
                found.append(match)
            return bool(found)

        self._until(look, timeout, f"log line {pattern!r}")
        return found[0]

    def _until(self, done: Callable[[], bool], timeout: float, what: str) -> None:
        deadline = time.monotonic() + timeout
        while not done():
            if self.process is None or self.process.poll() is not None:
                raise self._error(f"died while waiting for {what}")
            if time.monotonic() > deadline:
                raise self._error(f"waited {timeout:.0f} s for {what}")
            time.sleep(POLL_S)

    def _error(self, message: str) -> ServerError:
        tail = "\n".join(self.log_text().splitlines()[-60:])
        return ServerError(f"SGLang server: {message}\n--- end of {self.options.log}\n{tail}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_group_gone(group: int, timeout: float = 10.0) -> None:
    """Wait until no process of the group is left, so that files and ports are free again."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(POLL_S)


@atexit.register
def _kill_running() -> None:
    for server in list(_running):
        server.kill()
