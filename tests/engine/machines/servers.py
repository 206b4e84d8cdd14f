"""What tests of several machines need besides SGLang, and servers that start together."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from bench.harness import mooncake
from bench.harness.server import Server
from tests.cpu_engine.hcache_cpu_engine import warm_extensions
from tests.engine.harness import router

_NO_TRANSFER, _NO_ROUTER = mooncake.missing(), router.missing()
TRANSFER = pytest.mark.skipif(_NO_TRANSFER is not None, reason=f"no transfer: {_NO_TRANSFER}")
ROUTER = pytest.mark.skipif(_NO_ROUTER is not None, reason=f"no router: {_NO_ROUTER}")


@contextmanager
def started(*servers: Server) -> Iterator[None]:
    """They start at the same time, and end with the block."""
    warm_extensions()
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.kill)
            server.launch()
        for server in servers:
            server.wait_ready()
        yield
