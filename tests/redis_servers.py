"""Real Redis servers for tests: alone, watched by a sentinel, or three as a cluster.

Each has a directory of its own and a free port on loopback, keeps nothing on disk, and is stopped
by its process id. Nothing else on the machine is touched.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

WAIT_S = 60.0
N_SLOTS = 16384


def free_port() -> int:
    """Return a port that nobody listens on now. A cluster node also takes the one 10,000 above."""
    while True:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port: int = sock.getsockname()[1]
        if port + 10_000 < 1 << 16:
            return port


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Wait until something holds.

    Raises:
        TimeoutError: When it does not within `WAIT_S`.
    """
    deadline = time.monotonic() + WAIT_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} took too long")
        time.sleep(0.01)


class Server:
    """A process of redis-server on a free port, started at once.

    Args:
        options: As on the command line, without the dashes.
        port: To listen on; a free one when not given.
        sentinel: Start it as a sentinel, with these lines of configuration.
    """

    def __init__(
        self, *, port: int | None = None, sentinel: str | None = None, **options: str
    ) -> None:
        self.port = port or free_port()
        self.directory = Path(tempfile.mkdtemp(prefix="llamakeep-redis-"))
        self.options = options
        self.sentinel = sentinel
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, empty, and wait until it answers."""
        command = ["redis-server"]
        if self.sentinel is not None:
            config = self.directory / "sentinel.conf"
            config.write_text(self.sentinel)
            command += [str(config), "--sentinel"]
        command += ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory)]
        if self.sentinel is None:
            command += ["--save", "", "--appendonly", "no"]
        for name, value in self.options.items():
            command += [f"--{name.replace('_', '-')}", *value.split()]
        self.log = self.directory / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        wait_until(self._answers, f"starting redis-server on port {self.port}")

    def _answers(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise RuntimeError(f"redis-server ended: {self.log.read_text()[-500:]}")
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1.0) as sock:
                sock.sendall(b"PING\r\n")
                return sock.recv(1) in b"+-"
        except OSError:
            return False

    def stop(self) -> None:
        """End the process, if it still runs, as a crash would."""
        process, self.process = self.process, None
        if process is not None:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()

    def pause(self) -> None:
        """Let the process hang: connections stay, and nothing is answered."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def client(self, **options: Any) -> Any:
        """Return a client of redis-py's own, which the caller closes."""
        import redis

        return redis.Redis(port=self.port, **options)

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)


class Cluster:
    """Three nodes with a third of the slots each, and no replicas."""

    def __init__(self) -> None:
        self.nodes = [Server(cluster_enabled="yes", cluster_node_timeout="2000") for _ in range(3)]
        try:
            self._join()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def _join(self) -> None:
        clients = [node.client() for node in self.nodes]
        try:
            for index, client in enumerate(clients):
                low, high = index * N_SLOTS // 3, (index + 1) * N_SLOTS // 3 - 1
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", low, high)
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
            for node in self.nodes[1:]:
                clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", node.port)
            for client in clients:
                wait_until(
                    lambda client=client: (
                        client.cluster("INFO")["cluster_state"] == "ok"
                        and client.cluster("INFO")["cluster_known_nodes"] == "3"
                    ),
                    "joining the cluster",
                )
        finally:
            for client in clients:
                client.close()

    def close(self) -> None:
        for node in self.nodes:
            node.close()


def need_redis_server() -> None:
    """Skip the test where redis-server is missing; fail it in CI, where it must not be."""
    if shutil.which("redis-server") is None:
        reason = "redis-server is not installed: apt-get install redis-server"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)


@contextmanager
def running(**options: str) -> Iterator[Server]:
    """A server of one's own, gone when the block ends."""
    need_redis_server()
    server = Server(**options)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[Server]:
    """The server of this test process; tests take prefixes of their own, and do not flush it."""
    with running() as server:
        yield server


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[Cluster]:
    """The cluster of this test process."""
    need_redis_server()
    cluster = Cluster()
    try:
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="session")
def redis_url(redis_server: Server) -> str:
    """Of the server of this test process."""
    return redis_server.url


@pytest.fixture(scope="session")
def redis_cluster_url(redis_cluster: Cluster) -> str:
    """Of the cluster of this test process."""
    return redis_cluster.url
