"""Prefill and decode servers on this machine: K and V go between them by Mooncake, over TCP.

Nothing stands in front of them: a client sends a request to one of each, as SGLang's router does.
"""

import dataclasses
import itertools
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests

from bench.harness.server import Server, ServerOptions, free_port

_TRANSFER = ("--disaggregation-transfer-backend", "mooncake_tcp")


class PrefillServer(Server):
    """A prefill server; decode servers find it at ``bootstrap_port``, once it was launched."""

    def __init__(self, options: ServerOptions):
        self.bootstrap_port = 0
        self._options = _with(options, "--disaggregation-mode", "prefill", *_TRANSFER)
        super().__init__(self._options)

    def launch(self, port: int | None = None) -> None:
        """Start the process; decode servers find it at another port than before."""
        self.bootstrap_port = free_port()
        place = ("--disaggregation-bootstrap-port", str(self.bootstrap_port))
        self.options = _with(self._options, *place)
        super().launch(port)


class DecodeServer(Server):
    """A decode server, which is asked together with one of its prefill servers, in turn.

    Answers are its own, with the cached tokens that the prefill server found.
    """

    def __init__(self, options: ServerOptions, prefill: Sequence[PrefillServer]):
        self.prefill = list(prefill)
        self._turn = itertools.count()
        super().__init__(_with(options, "--disaggregation-mode", "decode", *_TRANSFER))

    def flush_cache(self, timeout: float = 60.0) -> None:
        """Of all of them."""
        for server in self.prefill:
            server.flush_cache(timeout)
        super().flush_cache(timeout)

    def _done(self, path: str, **options: Any) -> requests.Response:
        if path != "/generate":
            return super()._done(path, **options)
        prefill = self.prefill[next(self._turn) % len(self.prefill)]
        options["json"] |= {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": prefill.bootstrap_port,
            "bootstrap_room": random.SystemRandom().getrandbits(62),
        }
        with ThreadPoolExecutor(1) as pool:
            prefilled = pool.submit(prefill._done, path, **options)
            answer = super()._done(path, **options)
            prefilled.result()
        return answer


def _with(options: ServerOptions, *arguments: str) -> ServerOptions:
    return dataclasses.replace(options, extra_args=(*options.extra_args, *arguments))
