"""SGLang servers: the one way in which tests and programs that measure start one.

A server is ordered from the nursery (see :mod:`.processes`), on the CPU engine and on a GPU alike,
so none outlives the program that started it.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import requests

from bench.harness.options import ADMIN_KEY, MODULE, ServerOptions, as_text, base_environment
from bench.harness.processes import ServerProcess, nursery
from tests.cpu_engine.hcache_cpu_engine import warm_extensions

POLL_S = 0.05
WAIT_S = 240.0  # for a wait of a second, on a machine that is busy with other work
PORTS = (12000, 32000)


class ServerError(RuntimeError):
    """The server died, or a wait for it took too long; carries the end of its log."""


class CachedTokens(NamedTuple):
    """Prompt tokens that were not computed, by tier.

    ``unsplit`` are those of a server that does not name tiers (``--enable-cache-report``).
    """

    device: int = 0
    host: int = 0
    storage: int = 0
    unsplit: int = 0

    @property
    def total(self) -> int:
        return sum(self)

    @classmethod
    def of(cls, meta_info: Mapping[str, Any]) -> CachedTokens:
        details = meta_info.get("cached_tokens_details")
        if not details:
            return cls(unsplit=int(meta_info.get("cached_tokens") or 0))
        return cls(*(int(details.get(name) or 0) for name in ("device", "host", "storage")))


@dataclass(frozen=True)
class Reply:
    output_ids: list[int]
    meta_info: dict[str, Any]

    @property
    def cached(self) -> CachedTokens:
        return CachedTokens.of(self.meta_info)

    @property
    def top2(self) -> list[tuple[float, float]]:
        """The two best log-probabilities at each token; needs `generate(..., logprobs=True)`."""
        return [(best[0], second[0]) for best, second in self.meta_info["output_top_logprobs"]]


class Server:
    """`with Server(ServerOptions(...)) as server:` - ready to answer when the block is entered.

    The server's processes form one group, which is killed on exit from the block and, however
    it ends, with this interpreter (see `processes`). There is nothing to lose in a kill: L3 must
    survive one by design.
    """

    ready_path = "/health"  # answers with 200 once requests are answered

    def __init__(self, options: ServerOptions):
        self.options = options
        self.port = 0
        self.process: ServerProcess | None = None

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if error is not None and not isinstance(error, ServerError):
            error.add_note(str(self.error("in use")))  # its log may soon be deleted
        self.kill()

    # -- life

    def start(self, port: int | None = None) -> None:
        """Start and wait until requests are answered; raises ServerError with the log's end."""
        if self.options.device == "cpu":
            warm_extensions()
        self.launch(port)
        try:
            self.wait_ready()
        except BaseException:
            self.kill()
            raise

    def launch(self, port: int | None = None) -> None:
        """Start the process without waiting for it (as one that is expected to refuse)."""
        self.port = port or free_port()
        self.options.log.parent.mkdir(parents=True, exist_ok=True)
        self.process = nursery(base_environment("cpu")).launch(
            MODULE,
            self.options.arguments(self.port),
            self.options.environment(),
            self.options.log,
            fresh=not self.options.forks,
        )

    def wait_exit(self, timeout: float = WAIT_S) -> int:
        """Exit status of a server that was launched in order to fail."""
        assert self.process is not None
        try:
            return self.process.wait(timeout)
        except TimeoutError:
            raise self.error(f"still running after {timeout:.0f} s") from None
        finally:
            self.kill()

    def kill(self) -> None:
        """SIGKILL to the whole process group; returns when the processes are gone."""
        if self.process is not None:
            self.process.kill_group()
            self.process = None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the server."""
        assert self.process is not None
        os.killpg(self.process.pid, number)

    def wait_ready(self) -> None:
        """Wait until a server that was launched answers; raises ServerError with the log's end."""
        assert self.process is not None
        deadline = time.monotonic() + self.options.ready_timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise self.error(f"exited with {self.process.returncode} while starting")
            with contextlib.suppress(requests.RequestException):
                if requests.get(self.url + self.ready_path, timeout=5).status_code == 200:
                    return
            time.sleep(POLL_S)
        raise self.error(f"not ready after {self.options.ready_timeout_s:.0f} s")

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
        lora: str | None = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        replica: int | None = None,
        priority: int | None = None,
        timeout: float = 600.0,
        **sampling: Any,
    ) -> Reply:
        """One request, greedy unless `sampling` says otherwise; never stops at a token.

        `lora` names an adapter of `--lora-paths`, `replica` the one of `dp` that is to answer.
        """
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
        more: dict[str, Any] = {"lora_path": lora, "cache_salt": cache_salt, "extra_key": extra_key}
        more |= {"priority": priority, "routed_dp_rank": replica}
        body |= {name: value for name, value in more.items() if value is not None}
        reply = self._done("/generate", json=body, timeout=timeout).json()
        return Reply(reply["output_ids"], reply["meta_info"])

    def score(self, input_ids: Sequence[int], start: int) -> tuple[list[int], list[float], int]:
        """The model's judgement of each token from ``start`` (at least 1) on, in one prefill.

        Returns:
            The most likely token in each place, log-probabilities of the true tokens, and how many
            tokens before them came from L3.
        """
        body = {
            "input_ids": list(input_ids),
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": start - 1,
            "top_logprobs_num": 1,
        }
        said = self._done("/generate", json=body, timeout=600.0).json()["meta_info"]
        best = [found[0][1] for found in said["input_top_logprobs"][1:]]
        logprobs = [found[0] for found in said["input_token_logprobs"][1:]]
        return best, logprobs, CachedTokens.of(said).storage

    def generate_many(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, **options: Any
    ) -> list[Reply]:
        """All prompts at once, one thread each; replies in the order of `prompts`."""
        one = partial(self.generate, max_new_tokens=max_new_tokens, **options)
        with ThreadPoolExecutor(max_workers=len(prompts)) as pool:
            return list(pool.map(one, prompts))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the block nothing is computed and new requests wait; prefetches go on."""
        self._done("/pause_generation", json={"mode": "in_place"})
        try:
            yield
        finally:
            self._done("/continue_generation", json={})

    def abort_request(self, rid: str) -> None:
        """POST /abort_request; SGLang does not say whether there was such a request."""
        self._done("/abort_request", json={"rid": rid})

    def flush_cache(self, timeout: float = 60.0) -> None:
        """Empty device and host caches once the server is idle; L3 is not touched.

        SGLang counts write-through and L3 backups in flight as work, so everything that was to be
        backed up is in L3 when this returns.
        """
        self._done("/flush_cache", params={"timeout": timeout}, timeout=timeout + 60)

    def wait_backed_up(self) -> None:
        """Wait until the write-through to host and L3 is finished, without flushing anything.

        The scheduler itself is asked: it refuses an attach while requests, write-throughs, loads,
        prefetches or L3 backups are in flight, and one with an unknown policy in any case and
        without side effects. The reason that it gives tells which it was.
        """

        def idle() -> bool:
            probe = {"hicache_storage_prefetch_policy": "idle-probe"}
            answer = self._put_storage({"hicache_storage_backend": "file", **probe})
            if "idle-probe" not in answer.text and "not idle" not in answer.text:
                raise self.error(f"idle probe answered {answer.status_code}: {answer.text}")
            return "not idle" not in answer.text

        self.until(idle, "backups to finish")

    def update_weights_from_disk(self, model: Path, *, flush: bool = True) -> None:
        """Replies say of which weights they are: ``weight_version`` is the folder's name."""
        body = {"model_path": str(model), "flush_cache": flush, "weight_version": model.name}
        answer = self._done("/update_weights_from_disk", json=body)
        if not answer.json()["success"]:
            raise self.error(f"update_weights_from_disk: {answer.text}")

    def release_memory(self) -> None:
        """Give up the KV pool's memory, as RL trainers ask for it, and take it back."""
        for what in ("release", "resume"):
            self._done(f"/{what}_memory_occupation", json={"tags": ["kv_cache"]})

    def _done(self, path: str, **options: Any) -> requests.Response:
        answer = self._request("POST", path, **options)
        if answer.status_code != 200:
            raise self.error(f"{path} answered {answer.status_code}: {answer.text}")
        return answer

    # -- storage administration (answers are returned: tests look at refusals too)

    def attach_storage(
        self, backend: str, extra_config: Mapping[str, Any] | str | None = None, **body: Any
    ) -> requests.Response:
        """PUT /hicache/storage-backend. Policies go in `body`, by SGLang's names.

        A reply comes before the scheduler is idle again, so this waits until it is.
        """
        body["hicache_storage_backend"] = backend
        if extra_config is not None:
            body["hicache_storage_backend_extra_config_json"] = as_text(extra_config)
        self.wait_backed_up()
        return self._put_storage(body)

    def _put_storage(self, body: Mapping[str, Any]) -> requests.Response:
        return self._request("PUT", "/hicache/storage-backend", json=dict(body))

    def storage_info(self) -> requests.Response:
        return self._request("GET", "/hicache/storage-backend")

    def detach_storage(self) -> None:
        """DELETE /hicache/storage-backend, repeated while it answers 400 (just after a request)."""
        self.until(
            lambda: self._request("DELETE", "/hicache/storage-backend").status_code == 200, "detach"
        )

    def clear_storage(self) -> requests.Response:
        return self._request("POST", "/hicache/storage-backend/clear")

    def _request(
        self, method: str, path: str, timeout: float = 120.0, **options: Any
    ) -> requests.Response:
        options |= {"headers": {"Authorization": f"Bearer {ADMIN_KEY}"}, "timeout": timeout}
        try:
            return requests.request(method, self.url + path, **options)
        except requests.RequestException as error:
            raise self.error(f"{method} {path}: {error}") from error

    # -- waiting

    def log_text(self) -> str:
        return self.options.log.read_text(errors="replace")

    def wait_for_log(self, pattern: str) -> re.Match[str]:
        """First match of the regular expression `pattern` in the log, waiting for it."""
        found: list[re.Match[str]] = []

        def look() -> bool:
            if match := re.search(pattern, self.log_text()):
                found.append(match)
            return bool(found)

        self.until(look, f"log line {pattern!r}")
        return found[0]

    def until(self, done: Callable[[], bool], what: str) -> None:
        """Wait until `done`; raises ServerError with the name `what` if it takes too long."""
        deadline = time.monotonic() + WAIT_S
        while not done():
            if self.process is None or self.process.poll() is not None:
                raise self.error(f"died while waiting for {what}")
            if time.monotonic() > deadline:
                raise self.error(f"waited {WAIT_S:.0f} s for {what}")
            time.sleep(POLL_S)

    def error(self, message: str) -> ServerError:
        tail = "\n".join(self.log_text().splitlines()[-60:])
        return ServerError(f"SGLang server: {message}\n--- end of {self.options.log}\n{tail}")


def unwind_when_terminated() -> None:
    """On SIGTERM leave blocks as on an error, so that temporary folders are removed too."""

    def unwind(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, unwind)


def free_port() -> int:
    """A free port below the range from which the kernel serves `bind(0)`.

    A server's own workers bind a dozen such ports before the server binds its own.
    """
    while True:
        port = random.SystemRandom().randrange(*PORTS)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
