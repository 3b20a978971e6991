"""Runs whose programs reach a port that this process serves: both ways, bounded, closed with the run."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.sandbox.backends import OWN_BOXES, sandbox_of
from tests.until import until

from penstock.sandbox import SandboxError, SandboxLost, ServedSession
from penstock.sandbox.inside.forward import MAX_CONNECTIONS, WINDOW_BYTES

BEGIN = """
import socket, sys, threading, time
threading.stack_size(1 << 18)  # boxes without a cgroup limit the address space
def connect(): return socket.create_connection(("127.0.0.1", PORT))
"""


class Echo:
    """Serves connections: what comes in goes back."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self.accepted = 0
        self.read = 0
        self.reading = asyncio.Event()
        self.reading.set()

    def accept(self, connection: socket.socket) -> None:
        self.accepted += 1
        task = asyncio.create_task(self._echo(connection))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _echo(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        try:
            while True:
                await self.reading.wait()
                if not (data := await reader.read(4096)):
                    break
                self.read += len(data)
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


@pytest_asyncio.fixture(params=OWN_BOXES)
async def session(request: pytest.FixtureRequest) -> AsyncIterator[ServedSession]:
    async with sandbox_of(request.param) as sandbox:
        session = await sandbox.start("a test")
        yield session  # type: ignore[misc]
        await session.close()


async def python(session: ServedSession, echo: Echo, code: str, **options: object):
    port = await session.open_port()
    text = BEGIN.replace("PORT", str(port)) + code
    return await session.run_served(["python3", "-c", text], echo.accept, **options)  # type: ignore[arg-type]


async def test_bytes_go_both_ways_on_connections_side_by_side(session):
    code = """
def talk(n):
    data = bytes([n]) * 300_000
    with connect() as one:
        threading.Thread(target=lambda: (one.sendall(data), one.shutdown(socket.SHUT_WR))).start()
        back = b""
        while piece := one.recv(65536): back += piece
    assert back == data
threads = [threading.Thread(target=talk, args=(n,)) for n in range(8)]
for one in threads: one.start()
for one in threads: one.join()
print("all")
"""
    echo = Echo()
    result = await python(session, echo, code)
    assert (result.stdout, result.exit_code) == ("all\n", 0), result.stderr
    assert (echo.accepted, echo.read) == (8, 8 * 300_000)
    await asyncio.wait_for(asyncio.gather(*echo.tasks), 200)


async def test_a_port_stays_and_every_run_has_its_own_connections(session):
    echo = Echo()
    code = "one = connect(); one.sendall(b'hi'); print(one.recv(2))"
    assert await session.open_port() == await session.open_port()
    for _ in range(2):
        assert (await python(session, echo, code)).stdout == "b'hi'\n"
    await asyncio.wait_for(asyncio.gather(*echo.tasks), 200)
    assert echo.accepted == 2
    assert (await session.run(["echo", "after"])).stdout == "after\n"


async def test_a_reader_that_waits_bounds_what_is_under_way(session):
    code = """
one = connect()
one.setblocking(False)
sent, quiet = 0, time.monotonic()
while time.monotonic() - quiet < 5:
    try:
        sent += one.send(b"x" * 65536)
        quiet = time.monotonic()
    except BlockingIOError:
        time.sleep(0.01)
print(sent)
"""
    echo = Echo()
    echo.reading.clear()
    result = await python(session, echo, code)
    assert result.exit_code == 0, result.stderr
    assert echo.read == 0
    assert WINDOW_BYTES < int(result.stdout) < 64 << 20  # and the kernel's buffers of three sockets


async def test_a_program_that_does_not_read_holds_up_no_other_connection(session):
    code = """
deaf = connect()
deaf.settimeout(2)
try:
    while True: deaf.sendall(b"x" * 65536)
except OSError: pass
one = connect(); one.sendall(b"hi"); print(one.recv(2))
"""
    assert (await python(session, Echo(), code)).stdout == "b'hi'\n"


async def test_connections_beyond_the_limit_wait_for_others_to_end(session):
    code = f"""
held = [connect() for _ in range({MAX_CONNECTIONS})]
for one in held: one.sendall(b"hi"); assert one.recv(2) == b"hi"
late = connect(); late.sendall(b"hi"); late.settimeout(1)
try: late.recv(2); print("served")
except OSError: print("waits")
held[0].close()
late.settimeout(60)
print(late.recv(2))
"""
    assert (await python(session, Echo(), code)).stdout == "waits\nb'hi'\n"


async def test_resets_on_both_sides_leave_the_run_as_it_is(session):
    code = """
import struct
for _ in range(50):
    one = connect(); one.sendall(b"x" * 5000)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)); one.close()
print("done")
"""

    class Refuses(Echo):
        def accept(self, connection: socket.socket) -> None:
            self.accepted += 1
            connection.close()

    for echo in (Echo(), Refuses()):
        assert (await python(session, echo, code)).stdout == "done\n"
        assert 0 < echo.accepted <= 50
    assert (await session.run(["echo", "after"])).stdout == "after\n"


async def test_a_run_can_be_stopped_and_its_box_lives_on(session):
    stop, echo = asyncio.Event(), Echo()
    code = "open('kept', 'w').write('yes')\none = connect(); one.sendall(b'hi'); one.recv(2); time.sleep(600)"
    running = asyncio.create_task(python(session, echo, code, stop=stop, timeout_s=300.0))
    await until(lambda: echo.read == 2)
    stop.set()
    result = await asyncio.wait_for(running, 200)
    assert (result.limit, result.exit_code) == ("stopped", None)
    assert await session.read_file("kept") == b"yes"


async def test_limits_hold_and_the_end_of_the_output_is_kept(session):
    result = await python(session, Echo(), "for n in range(20_000): print(n)\nsys.exit(3)")
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (3, "19999")
    result = await python(session, Echo(), "print('begun', flush=True); time.sleep(600)", timeout_s=10.0)
    assert (result.limit, result.stdout) == ("wall", "begun\n")
    result = await python(session, Echo(), "while True: print('x' * 65536)")
    assert result.limit == "output"


async def test_a_cancelled_run_closes_its_connections(session):
    echo = Echo()
    code = "one = connect(); one.sendall(b'hi'); one.recv(2); time.sleep(600)"
    running = asyncio.create_task(python(session, echo, code, timeout_s=300.0))
    await until(lambda: echo.read == 2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.wait_for(asyncio.gather(*echo.tasks), 200)


async def test_without_a_port_nothing_is_run(session):
    with pytest.raises(SandboxError, match="no port"):
        await session.run_served(["true"], Echo().accept)
    await session.close()
    with pytest.raises(SandboxLost):
        await session.open_port()
