"""One folder, several containers: their processes have equal numbers (PIDs)."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_testing import assert_sound, names, open_quiet

CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
ORDINARY = ("setpriv", "--reuid", "1000", "--regid", "1000", "--clear-groups")

STORE = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from store_testing import NAMESPACE, content, get, key, open_quiet, put
store = open_quiet(Path(sys.argv[2]), writer=sys.argv[3].encode())
print(os.getpid(), flush=True)
for line in sys.stdin:
    what, first, last = line.split()
    numbers = range(int(first), int(last))
    if what == "put":
        print(put(store, *numbers).count(True), flush=True)
    else:
        print(sum(get(store, n) == content(key(n)) for n in numbers), flush=True)
store.close()
"""

COMMANDS = """
import json, os, sys
from typer.testing import CliRunner
from hcache_backend.cli.main import app
results = []
for command in sys.argv[2:]:
    result = CliRunner().invoke(app, [*command.split(), "-d", sys.argv[1], "--json"])
    results.append([result.exit_code, result.output])
print(json.dumps([os.getpid(), results]))
"""


@pytest.fixture(params=["root", "an ordinary user"])
def user(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, ...]:
    """What runs a container's process; it may use ``tmp_path``."""
    command = ORDINARY if request.param != "root" else ()
    inside = (*CONTAINER, *command)
    if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no PID namespaces here, or no other user")
    if command:
        os.chown(tmp_path, 1000, 1000)
        for folder in tmp_path.parents:
            if not subprocess.run([*command, "test", "-x", folder], check=False).returncode:
                continue
            folder.chmod(folder.stat().st_mode | 0o011)
        readable = [*command, "test", "-r", str(Path(__file__)), "-a", "-x", sys.executable]
        if subprocess.run(readable, check=False).returncode:
            pytest.skip("an ordinary user cannot read this checkout or its Python")
    return inside


class Container:
    """A store that is open in a container of its own."""

    def __init__(self, inside: tuple[str, ...], folder: Path, writer: str) -> None:
        here = str(Path(__file__).parent)
        self.process = subprocess.Popen(
            [*inside, sys.executable, "-c", STORE, here, str(folder), writer],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._answer()

    def ask(self, what: str, numbers: range) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what} {numbers.start} {numbers.stop}\n")
        self.process.stdin.flush()
        return self._answer()

    def kill(self) -> None:
        """SIGKILL to the process that has the store open."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        os.kill(int(children.split()[0]), signal.SIGKILL)
        self.process.wait()

    def _answer(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())


@pytest.fixture
def containers() -> Iterator[list[Container]]:
    started: list[Container] = []
    yield started
    for container in started:
        if container.process.poll() is None:
            container.process.communicate(timeout=60)


def test_two_containers_share_a_folder(
    user: tuple[str, ...], tmp_path: Path, containers: list[Container]
) -> None:
    folder = tmp_path / "store"
    first, second = (Container(user, folder, f"writer-{n}") for n in (1, 2))
    containers += [first, second]
    assert first.pid == second.pid == 1
    for round_number in range(3):
        start = 20 * round_number
        assert first.ask("put", range(start, start + 10)) == 10
        assert second.ask("put", range(start + 10, start + 20)) == 10
        assert first.ask("get", range(start + 20)) == start + 20
        assert second.ask("get", range(start + 20)) == start + 20
        second.kill()  # the other one goes on, and the next one finds everything
        assert first.ask("get", range(start + 20)) == start + 20
        second = Container(user, folder, "writer-2")
        containers.append(second)
    for container in (first, second):
        container.process.communicate(timeout=60)
        assert container.process.returncode == 0
    store = open_quiet(folder)
    assert_sound(store)
    assert names(folder / "sessions") == [store.disks[0]._folder.session.token]


def test_commands_run_in_another_container(
    user: tuple[str, ...], tmp_path: Path, containers: list[Container]
) -> None:
    folder = tmp_path / "store"
    server = Container(user, folder, "writer-1")
    containers.append(server)
    assert server.ask("put", range(10)) == 10
    commands = ("stats", "ls", "verify", "verify --repair", "gc", "doctor", "clear --yes")
    done = subprocess.run(
        [*user, sys.executable, "-c", COMMANDS, str(folder), *commands],
        capture_output=True,
        text=True,
        check=True,
    )
    pid, results = json.loads(done.stdout.splitlines()[-1])
    assert pid == server.pid
    assert [status for status, _ in results] == [0] * len(commands), results
    assert json.loads(results[0][1])["folders"][0]["pages"] == 10
    assert json.loads(results[-1][1])["pages"] == 10
    assert server.ask("get", range(10)) == 0
    assert server.ask("put", range(10)) == 10
    assert server.ask("get", range(10)) == 10
