"""SGLang's router in front of servers on this machine; run as a program, the router itself."""

import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.harness.options import base_environment
from bench.harness.processes import nursery
from bench.harness.server import Server, ServerOptions, free_port
from tests.engine.harness.disaggregation import PrefillServer

_HEALTH = ("--health-check-interval-secs", "1", "--health-success-threshold", "1")
# By default one request's five retries may all go to a worker that is gone, and an open circuit
# stays open for a minute, also when the worker is back.
_CIRCUIT_SECONDS = 2
_RETRIES = ("--cb-failure-threshold", "2", "--cb-timeout-duration-secs", str(_CIRCUIT_SECONDS))
_BALANCE = ("--policy", "cache_aware", "--cache-threshold", "0.3", "--balance-abs-threshold", "3")


def missing() -> str | None:
    """Why the router cannot be used here, or None."""
    if importlib.util.find_spec("sglang_router") is None:
        return "no sglang-router; see requirements/dev.txt"
    return None


class Router(Server):
    """Sends each request to the worker that is likely to have its prefix, and again if that fails.

    ``workers`` are replicas, or prefill and decode servers.
    """

    ready_path = "/readiness"

    def __init__(self, workers: Sequence[Server], log: Path):
        self.workers = list(workers)
        super().__init__(ServerOptions(self.workers[0].options.model, log))

    def launch(self, port: int | None = None) -> None:
        self.port = port or free_port()
        here = ["--host", "127.0.0.1", "--port", str(self.port)]
        env = base_environment("cpu")
        paths = [str(Path(__file__).parents[3]), env.get("PYTHONPATH", "")]
        self.process = nursery(env).launch(
            "tests.engine.harness.router",
            [*here, "--prometheus-port", str(free_port()), *self._addresses(), *_HEALTH, *_RETRIES],
            {**env, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            self.options.log,
            fresh=True,
        )

    def _addresses(self) -> list[str]:
        if not any(isinstance(worker, PrefillServer) for worker in self.workers):
            return ["--worker-urls", *(worker.url for worker in self.workers), *_BALANCE]
        found = ["--pd-disaggregation"]
        for worker in self.workers:
            if isinstance(worker, PrefillServer):
                found += ["--prefill", worker.url, str(worker.bootstrap_port)]
            else:
                found += ["--decode", worker.url]
        return found

    def flush_cache(self, timeout: float = 60.0) -> None:
        """Of all workers."""
        for worker in self.workers:
            worker.flush_cache(timeout)

    def until_serving(self, worker: Server) -> None:
        """Wait until requests are sent to ``worker`` (again)."""

        def serving() -> bool:
            known = self._request("GET", "/workers").json()["workers"]
            return any(one["url"] == worker.url and one["is_healthy"] for one in known)

        self.until(serving, f"{worker.url} to be one of its workers")
        # A worker that came back sooner still has an open circuit, which the router does not tell.
        time.sleep(_CIRCUIT_SECONDS)


if __name__ == "__main__":
    sys.modules["sglang"] = None  # type: ignore[assignment]  # it would be imported for its version
    from sglang_router.launch_router import main

    main()
