"""Another user of this machine on the port of a server: no key is sent to him. He is a real other user."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from corral.client.client import Client
from corral.client.endpoint import Endpoint
from corral.client.errors import RequestError, ServerGoneError, StrangerError
from corral.deploy.deployment.state import State
from corral.deploy.lifecycle.tunnel import NearEnd
from corral.node.agent.probe import Server
from corral.node.sockets import TcpSocket, is_local, peer_users, tcp_sockets
from corral.serve.gateway.gateway import Gateway
from corral.serve.gateway.keys import digest_of
from corral.serve.gateway.member import MemberReading
from corral.serve.gateway.usage import KeyGrant
from corral.use.batch.core.lanes import Verdict, judge
from tests.testbed import NOT_ROOT
from tests.until import free_port, until

other_user = pytest.mark.skipif(os.getuid() != 0, reason=NOT_ROOT)
LISTENER = """
import os, socket, sys
os.setgid(65534)
os.setuid(65534)
listener = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
listener.bind((sys.argv[1], int(sys.argv[2])))
listener.listen()
print("up", flush=True)
if sys.argv[3] == "accepts":
    while True:
        connection, _ = listener.accept()
        print(repr(connection.recv(65536)), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def stranger(port: int, host: str = "127.0.0.1", manner: str = "accepts") -> Iterator[subprocess.Popen[str]]:
    """A listener of another user that writes down what it is sent."""
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENER, host, str(port), manner],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/",
    )  # fmt: skip
    assert process.stdout
    try:
        assert process.stdout.readline() == "up\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.touch(mode=0o600)
    path.write_text("sk-secret")
    return path


def heard(process: subprocess.Popen[str]) -> str:
    process.kill()
    return process.communicate()[0]


@other_user
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "0.0.0.0"])
@pytest.mark.parametrize("manner", ["accepts", "waits"])
def test_a_client_sends_no_key_to_another_user(key_file: Path, host: str, manner: str) -> None:
    port = free_port()
    with stranger(port, host, manner) as process:
        url = "http://[::1]" if ":" in host else "http://127.0.0.1"
        client = Client(Endpoint(f"{url}:{port}/v1", "m", str(key_file)))
        with client, pytest.raises(StrangerError, match=r"nobody.*no key was sent") as caught:
            client.page_sync("/health", timeout_s=20)
        assert judge(caught.value) is Verdict.AWAY  # a batch waits for its server; no row is blamed
        assert "secret" not in heard(process)


def ask_in_vain(endpoint: Endpoint) -> None:
    """A request to a listener that never answers."""
    with Client(endpoint) as client, pytest.raises(RequestError):
        client.page_sync("/health", timeout_s=2)


@other_user
def test_a_user_who_is_trusted_by_name_gets_it(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORRAL_TRUST_USERS", "nobody, no-such-user")
    port = free_port()
    with stranger(port) as process:
        ask_in_vain(Endpoint(f"http://127.0.0.1:{port}", "m", str(key_file)))
        assert "sk-secret" in heard(process)


@other_user
def test_a_server_without_a_key_is_asked_whoever_runs_it() -> None:
    port = free_port()
    with stranger(port) as process:
        ask_in_vain(Endpoint(f"http://127.0.0.1:{port}", "m"))
        assert "GET /health" in heard(process)


@other_user
def test_a_gateway_sends_no_key_to_another_user() -> None:
    async def ask(port: int) -> bytes:
        gateway = Gateway()
        await gateway.listen("127.0.0.1", 0)
        member = MemberReading("one", State.READY, f"http://127.0.0.1:{port}", model="m", key="sk-secret")
        gateway.update([member], [KeyGrant("client", digest_of(b"sk-client-secret"))])
        reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
        writer.write(b"GET /v1/anything HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-client-secret\r\n\r\n")
        answer = await reader.readuntil(b"}}")
        writer.close()
        await gateway.close()
        return answer

    port = free_port()
    with stranger(port) as process:
        answer = asyncio.run(ask(port))
        assert b"502" in answer.splitlines()[0]
        assert b"held by another user" in answer
        assert "secret" not in heard(process)


@other_user
def test_an_agent_sends_no_key_to_who_took_its_engines_port(key_file: Path) -> None:
    port = free_port()
    server = Server({"host": "127.0.0.1", "port": port, "model": "m", "key_file": str(key_file)})
    server.users = {0, os.getuid()}
    with stranger(port) as process:
        with pytest.raises(OSError, match="another user took"):
            server.counters()
        assert "secret" not in heard(process)


def test_a_connection_to_another_machine_is_not_asked_about() -> None:
    near, far = socket.socketpair()
    with near, far:
        assert not is_local(near)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("accepted", [False, True])
def test_our_own_listener_is_found(address: str, accepted: bool) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((address, 0), family=family))
        connection = stack.enter_context(socket.create_connection(listener.getsockname()[:2]))
        if accepted:
            stack.enter_context(listener.accept()[0])
        assert peer_users(connection) == {os.getuid()}


def test_a_listener_on_every_address_of_both_kinds_is_found() -> None:
    listener = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    with listener, socket.create_connection(("127.0.0.1", listener.getsockname()[1])) as connection:
        assert peer_users(connection) == {os.getuid()}
        with listener.accept()[0]:
            assert peer_users(connection) == {os.getuid()}


# ----------------------------------------------------------------------------------------- the near end of a tunnel


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Path]:
    """A socket file where ssh would listen: it says what it was told, then the end."""
    path = tmp_path / "far"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=echo, args=(connection,), daemon=True).start()

    def echo(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            data = b""
            while piece := connection.recv(1 << 16):
                data += piece
            connection.sendall(data[::-1])

    threading.Thread(target=serve, daemon=True).start()
    yield path
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def say_all(connection: socket.socket, data: bytes) -> None:
    connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)


def test_the_near_end_passes_on_both_ways_and_half_closed(far: Path) -> None:
    with NearEnd(0, far) as near, socket.create_connection(("127.0.0.1", near.port)) as connection:
        data = os.urandom(3 << 20)
        threading.Thread(target=say_all, args=(connection, data)).start()
        back = b""
        while piece := connection.recv(1 << 16):
            back += piece
    assert back == data[::-1]


def answering_socket(path: Path, name: bytes, go_on: threading.Event) -> socket.socket:
    """A server that answers each request with its name, in two pieces."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def answer(connection: socket.socket) -> None:
        with connection:
            while request := connection.recv(1 << 16):
                connection.sendall(name + b"<")
                if request == b"slow":
                    go_on.wait(60)
                connection.sendall(request + b">")

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return listener


def test_a_near_end_that_leads_elsewhere_moves_kept_connections_between_requests(tmp_path: Path) -> None:
    go_on = threading.Event()
    old, new = tmp_path / "old", tmp_path / "new"

    def asked(connection: socket.socket, request: bytes) -> bytes:
        connection.sendall(request)
        return rest(connection)

    def rest(connection: socket.socket) -> bytes:
        data = b""
        while not data.endswith(b">"):
            data += connection.recv(1 << 16)
        return data

    with answering_socket(old, b"old", go_on), answering_socket(new, b"new", go_on), NearEnd(0, old) as near:
        kept, running = (socket.create_connection(("127.0.0.1", near.port), timeout=60) for _ in range(2))
        with kept, running:
            assert asked(kept, b"1") == b"old<1>"
            running.sendall(b"slow")
            assert running.recv(4) == b"old<"
            near.lead_to(new)
            assert asked(kept, b"2") == b"new<2>"
            assert near.uses(old)
            go_on.set()
            assert rest(running) == b"slow>"  # it finishes where it began
            assert asked(running, b"3") == b"new<3>"
            until(lambda: not near.uses(old))


def test_the_near_end_keeps_its_port_while_ssh_is_away(tmp_path: Path) -> None:
    with NearEnd(0, tmp_path / "nobody-listens") as near:
        connection = socket.create_connection(("127.0.0.1", near.port))
        with connection, pytest.raises(ConnectionResetError):
            connection.recv(1)
        with Client(Endpoint(f"http://127.0.0.1:{near.port}", "m")) as client, pytest.raises(ServerGoneError):
            client.page_sync("/health", timeout_s=20)
        with socket.socket() as thief:  # as a stranger would, between two connections
            thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                thief.bind(("127.0.0.1", near.port))


def test_ssh_does_not_outlive_a_tunnel_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import time; from corral.deploy.lifecycle.tunnel import _forwarding\n"
        "with _forwarding(['sleep', '1000']) as found:\n"
        "    print(found.ssh.pid, flush=True)\n"
        "    time.sleep(1000)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout
        child = Path("/proc") / holder.stdout.readline().strip()
        until(lambda: b"sleep\0001000" in (child / "cmdline").read_bytes(), "the command itself")
        holder.kill()

    def gone() -> bool:
        try:
            return "State:\tZ" in (child / "status").read_text()
        except OSError:
            return True

    until(gone, "the end of what it started")


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_connection_that_ends_while_its_owner_is_looked_up_is_a_lost_one(
    tmp_path: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(port: int) -> list[TcpSocket]:
        time.sleep(0.3)  # the near end resets the connection meanwhile
        return tcp_sockets(port)

    monkeypatch.setattr("corral.client.peer_check.tcp_sockets", slowly)
    with NearEnd(0, tmp_path / "nobody-listens") as near:
        client = Client(Endpoint(f"http://127.0.0.1:{near.port}", "m", str(key_file)))
        with client, pytest.raises(ServerGoneError, match="cannot be reached") as lost:
            client.page_sync("/health", timeout_s=30)
        assert judge(lost.value) is Verdict.AWAY


def test_nothing_is_left_of_a_near_end(far: Path) -> None:
    before = threading.active_count(), open_files()
    with NearEnd(0, far) as near:
        connections = [socket.create_connection(("127.0.0.1", near.port)) for _ in range(20)]
        for connection in connections:
            connection.sendall(b"x")
    for connection in connections:
        connection.close()
    until(lambda: open_files() <= before[1])
    until(lambda: threading.active_count() <= before[0])
