"""What hostile code tries. Each is contained, reported as what it is, and the session serves the next call."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from penstock.sandbox.protocol import RunResult, Session

pytestmark = pytest.mark.bwrap


async def attack(session: Session, code: str, timeout_s: float = 3.0) -> RunResult:
    """Run it, then prove that the session still serves."""
    result = await session.run_python(code, timeout_s=timeout_s)
    assert (await session.run_python("40 + 2")).stdout == "42\n"
    return result


async def test_fork_bomb(session: Session) -> None:
    code = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    result = await attack(session, code, timeout_s=0.7)
    assert (result.exit_code, result.limit, result.state_lost) == (None, "wall", True)
    count = "import os\nlen([p for p in os.listdir('/proc') if p.isdigit()])"
    assert (await session.run_python(count)).stdout == "2\n"


async def test_fork_bomb_as_a_command(session: Session) -> None:
    result = await session.run(["sh", "-c", "f() { f | f & }; f; sleep 60"], timeout_s=0.7)
    assert (result.exit_code, result.limit) in ((None, "wall"), (2, None), (254, None))
    assert (await session.run_python("1")).stdout == "1\n"


async def test_four_gigabytes_in_one_process(session: Session) -> None:
    result = await attack(session, "x = b'x' * (4 << 30)", timeout_s=20.0)
    assert (result.exit_code, result.limit, result.state_lost) == (None, "memory", True)


async def test_four_gigabytes_in_many_processes(session: Session) -> None:
    code = """
import os
for _ in range(12):
    if os.fork() == 0:
        x = b'x' * (100 << 20)
        os._exit(0)
for _ in range(12):
    os.wait()
"""
    result = await attack(session, code, timeout_s=20.0)
    assert result.limit == "memory"


async def test_memory_in_a_file_that_has_no_name(session: Session) -> None:
    code = "import os\nfd = os.memfd_create('x')\nwhile True:\n    os.write(fd, b'x' * (1 << 20))"
    assert (await attack(session, code, timeout_s=20.0)).limit == "memory"


@pytest.mark.parametrize(("path", "limit_mb"), [("/tmp/f", 64), ("/dev/shm/f", 16)])
async def test_ten_gigabytes_to_a_private_folder(session: Session, path: str, limit_mb: int) -> None:
    code = f"with open({path!r}, 'wb') as f:\n    for _ in range(10_000):\n        f.write(b'x' * (1 << 20))"
    result = await attack(session, code, timeout_s=10.0)
    assert result.stderr.endswith("OSError: [Errno 28] No space left on device\n")
    size = int((await session.run_python(f"import os\nprint(os.path.getsize({path!r}))")).stdout)
    assert size <= limit_mb << 20


async def test_ten_gigabytes_to_stdout(session: Session) -> None:
    result = await attack(session, "while True: print('y' * 65536)", timeout_s=10.0)
    assert (result.exit_code, result.limit) == (None, "output")
    assert len(result.stdout) == 65536
    assert (await session.run(["yes"], timeout_s=10.0)).limit == "output"


@pytest.mark.parametrize("code", ["while True: pass", "import time\ntime.sleep(1e9)", "import signal\nsignal.pause()"])
async def test_for_ever(session: Session, code: str) -> None:
    ignore = (
        "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except Exception: pass\n"
    )
    result = await attack(session, ignore + code, timeout_s=0.3)
    assert (result.limit, result.state_lost) == ("wall", True)


async def test_daemon_that_left_its_session_goes_with_the_box(session: Session) -> None:
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv('/usr/bin/sleep', ['sleep', '98765'])
    os._exit(0)
time.sleep(0.1)
"""
    assert (await attack(session, code)).exit_code == 0
    assert _running("98765")
    await session.close()
    assert not _running("98765")


def _running(argument: str) -> bool:
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if argument.encode() in file.read_bytes().split(b"\0"):
                return True
        except OSError:
            continue
    return False


async def test_host_files_and_environment(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TEST_SECRET", "hush-hush")
    code = f"""
import glob, os
for path in ('/etc/shadow', '/etc/passwd', '/root', '/home', '/sys', '/var', {os.getcwd()!r}):
    print(path, os.path.exists(path))
print(sorted(os.environ))
print([p for p in glob.glob('/proc/[0-9]*/environ') if os.access(p, os.R_OK) and b'hush' in open(p, 'rb').read()])
"""
    lines = (await attack(session, code)).stdout.splitlines()
    assert all(line.endswith(" False") for line in lines[:7])
    assert lines[7:] == ["['HOME', 'LANG', 'PATH', 'PWD']", "[]"]


async def test_network(session: Session) -> None:
    reached: list[object] = []

    async def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.append(writer.get_extra_info("peername"))
        writer.close()

    server = await asyncio.start_server(note, "0.0.0.0", 0)
    port = server.sockets[0].getsockname()[1]
    code = f"""
import socket
for address in ('127.0.0.1', '169.254.169.254', '10.0.0.1', '172.17.0.1', '8.8.8.8'):
    try:
        socket.create_connection((address, {port}), timeout=1)
        print('connected', address)
    except OSError as error:
        print(type(error).__name__)
with open('/proc/net/dev') as f:
    print([line.split(':')[0].strip() for line in f][2:])
try:
    socket.socket(40, socket.SOCK_STREAM)
    print('a socket to the hypervisor')
except OSError as error:
    print(error.errno)
"""
    result = await attack(session, code)
    server.close()
    await server.wait_closed()
    assert "connected" not in result.stdout
    assert result.stdout.splitlines()[0] == "ConnectionRefusedError"
    assert result.stdout.splitlines()[-2:] == ["['lo']", "1"]
    assert not reached


async def test_writing_outside_the_private_folders(session: Session) -> None:
    code = """
for path in ('/usr/x', '/usr/lib/x', '/bin/x', '/x', '/dev/x', '/etc/x', '/proc/sys/kernel/hostname', '/lib/x'):
    try:
        open(path, 'w')
        print('WROTE', path)
    except OSError:
        pass
"""
    assert (await attack(session, code)).stdout == ""


@pytest.mark.parametrize("path", ["/etc/shadow", "../../etc/shadow", "link/shadow", "/proc/1/root/etc/shadow"])
async def test_file_routes_do_not_lead_out(session: Session, path: str, tmp_path: Path) -> None:
    await session.run_python(f"import os\nos.symlink('/etc', 'link')\nos.symlink({str(tmp_path)!r}, 'out')")
    with pytest.raises(OSError, match=r"No such file|denied"):
        await session.read_file(path)
    with pytest.raises(OSError, match=r"No such file|Read-only|denied"):
        await session.write_file("out/x", b"x")
    with pytest.raises(OSError, match=r"Read-only|No such file"):
        await session.write_file("../usr/x", b"x")
    assert not list(tmp_path.iterdir())


async def test_output_that_looks_like_our_frames(session: Session) -> None:
    code = """
import json, os, struct
body = json.dumps({"id": 1, "stdout": "forged", "stderr": "", "exit_code": 0, "limit": None, "duration_s": 0}).encode()
for fd in range(256):
    try:
        os.write(fd, struct.pack('>I', len(body)) + body)
    except OSError:
        pass
"""
    result = await attack(session, code, timeout_s=0.7)
    assert result.stdout.startswith("\x00\x00\x00")
    assert '"forged"' in result.stdout


async def test_forged_outcomes_only_cut_short_the_codes_own_call(session: Session) -> None:
    code = """
import os, sys, time
number = sys._getframe(2).f_locals['number']
for fd in range(3, 20):
    for forged in (number, *range(100)):
        try:
            os.write(fd, b'%010d%010d' % (forged, 77))
        except OSError:
            pass
time.sleep(60)
"""
    result = await session.run_python(code, timeout_s=3.0)
    assert (result.exit_code, result.limit) == (77, None)
    assert (await session.run_python("1", timeout_s=0.3)).limit == "wall"
    assert (await session.run_python("1")).stdout == "1\n"


async def test_the_driver_cannot_be_ended_stopped_or_traced(session: Session) -> None:
    code = """
import ctypes, os
for number in range(1, 65):
    try: os.kill(1, number)
    except OSError: pass
for name in ('mem', 'environ', 'fd/0', 'fd/3', 'root/tmp'):
    try:
        open('/proc/1/' + name, 'r+b')
        print('OPENED', name)
    except OSError:
        pass
try: print(os.listdir('/proc/1/fd'))
except OSError: pass
libc = ctypes.CDLL(None)
print(libc.ptrace(16, 1, 0, 0), libc.syscall(438, os.pidfd_open(1), 0, 0))
"""
    assert (await attack(session, code)).stdout == "-1 -1\n"
    result = await attack(session, "import os\ntry: os.kill(-1, 9)\nfinally: os.kill(os.getpid(), 9)")
    assert (result.exit_code, result.state_lost) == (-9, True)


async def test_kernel_doors_are_shut(session: Session) -> None:
    code = """
import ctypes
libc = ctypes.CDLL(None)
print([libc.unshare(0x10000000), libc.unshare(0x20000), libc.mount(b'none', b'/tmp', b'tmpfs', 0, 0), libc.setns(3, 0)])
print([libc.syscall(n, 0, 0, 0, 0, 0) for n in (425, 321, 250, 323, 298)])
print(libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0))
import subprocess, threading
threading.Thread(target=lambda: print('thread')).start()
print(subprocess.run(['unshare', '-Ur', 'true']).returncode != 0)
"""
    lines = (await attack(session, code)).stdout.splitlines()
    assert lines[:3] == ["[-1, -1, -1, -1]", "[-1, -1, -1, -1, -1]", "-1"]
    assert sorted(lines[3:]) == ["True", "thread"]


async def test_limits_cannot_be_raised(session: Session) -> None:
    code = """
import resource
for what in (resource.RLIMIT_CPU, resource.RLIMIT_NOFILE, resource.RLIMIT_CORE):
    soft, hard = resource.getrlimit(what)
    try:
        resource.setrlimit(what, (hard + 1, hard + 1))
        print('RAISED', what)
    except (ValueError, OSError):
        pass
"""
    assert (await attack(session, code)).stdout == ""


async def test_a_million_files(session: Session) -> None:
    result = await attack(session, "for i in range(10**6): open(f'/tmp/{i}', 'w').close()", timeout_s=0.7)
    assert result.limit in ("wall", "memory")
