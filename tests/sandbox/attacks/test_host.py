"""What the host has: files, environment, Redis, network, other users' processes, other boxes."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

import pytest
from tests.sandbox.attacks.plants import NOBODY, SECRET, Host
from tests.sandbox.attacks.targets import Target, attack
from tests.sandbox.backends import on_every_backend
from tests.sandbox.orphans import MARK

from penstock.sandbox import Session

pytestmark = pytest.mark.asyncio(loop_scope="session")

REACH = """
import os, socket
def tried(name, what):
    try:
        found = what()
    except (OSError, ValueError) as error:
        print(name, type(error).__name__)
    else:
        print(name, 'REACHED', found)
def read(path):
    with open(path, 'rb') as file: return file.read(200)
def connect(address):
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as made:
        made.settimeout(2)
        made.connect(address)
        return True
def ask(address):
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as made:
        made.settimeout(30)
        made.connect(address)
        made.sendall(b'GET secret\\r\\n')
        return made.recv(200)
def send(address):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        return made.sendto(b'out', address)
"""


def probes(host: Host) -> str:
    """Each line of what it prints says what was tried; REACHED where it worked."""
    return f"""{REACH}
tried('file', lambda: read({str(host.folder / "checkpoint")!r}))
tried('write', lambda: open({str(host.folder / "written")!r}, 'w').write('x'))
tried('redis socket', lambda: ask({str(host.redis_socket)!r}))
tried('redis port', lambda: ask(('127.0.0.1', {host.redis_port})))
tried('loopback', lambda: connect(('127.0.0.1', {host.port})))
tried('abstract', lambda: connect('\\0' + {MARK!r}))
"""


async def test_attack_plants_are_real(host: Host) -> None:
    """Without a box around it the same code reaches all of them, as another user too."""
    command = ["/usr/bin/python3", "-c", probes(host)]
    user = NOBODY if os.geteuid() == 0 else None
    done = subprocess.run(command, user=user, cwd="/", capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.count("REACHED") == 6
    assert done.stdout.count(SECRET) == 3
    (host.folder / "written").unlink()
    while host.visitors():
        continue


@on_every_backend
async def test_attack_files_environment_redis_and_loopback(session: Session, host: Host) -> None:
    result = await attack(session, probes(host), timeout_s=20.0)
    assert len(result.stdout.splitlines()) == 6
    assert "REACHED" not in result.stdout
    assert not host.visitors()
    assert not (host.folder / "written").exists()


async def test_attack_secrets_wherever_a_process_looks(session: Session, host: Host) -> None:
    code = f"""{REACH}
import glob
print(sorted(os.environ))
places = '/etc/shadow /etc/gshadow /root /proc/1/environ /proc/kcore /proc/1/root/etc/shadow /dev/mem'.split()
for place in places + glob.glob('/root/*') + ['/var/run/docker.sock', '/run/docker.sock']:
    tried(place, lambda: read(place))
for pattern in ('/proc/[0-9]*/environ', '/proc/[0-9]*/cmdline', '/proc/[0-9]*/mounts'):
    for path in glob.glob(pattern):
        try:
            if {SECRET!r}.encode() in open(path, 'rb').read(): print(path, 'HAS IT')
        except OSError: pass
"""
    result = await attack(session, code, timeout_s=20.0)
    names, *rest = result.stdout.splitlines()
    assert set(eval(names)) <= {"HOME", "HOSTNAME", "LANG", "LC_CTYPE", "PATH", "PWD"}
    assert len(rest) >= 7
    assert not [line for line in rest if "REACHED" in line or "HAS IT" in line]
    assert SECRET not in result.stdout


async def test_attack_nothing_of_ours_is_handed_in(session: Session) -> None:
    """Every descriptor is a pipe of this run or /dev/null: no socket, no file in memory, no folder of the host."""
    code = """
import os
for fd in os.listdir('/proc/self/fd'):
    try: print(os.readlink('/proc/self/fd/' + fd))
    except OSError: pass
"""
    await session.run_shell("true")  # its pipes are none of theirs
    interpreter, command = await attack(session, code), await session.run(["python3", "-c", code])
    for result, own in ((interpreter, 5), (command, 3)):  # the interpreter's requests and outcomes beside the usual
        held = result.stdout.splitlines()
        assert {line.partition(":[")[0] for line in held} <= {"pipe", "/dev/null"}
        assert len(held) == len(set(held)) == own, held


async def test_attack_code_runs_out_of_memory_before_its_driver(session: Session) -> None:
    code = "print(open('/proc/self/oom_score_adj').read())"
    for result in (await attack(session, code), await session.run(["python3", "-c", code])):
        assert result.stdout.strip() == "1000"


@on_every_backend
async def test_attack_network(session: Session, host: Host) -> None:
    addresses = ["169.254.169.254", "10.0.0.1", "172.17.0.1", "8.8.8.8", *host_addresses()]
    code = f"""{REACH}
for address in {addresses!r}:
    tried(address, lambda: connect((address, {host.port})))
    tried(address + ' port 80', lambda: connect((address, 80)))
    tried(address + ' datagram', lambda: send((address, {host.udp_port})))
tried('datagram to all', lambda: send(('255.255.255.255', {host.udp_port})))
tried('name', lambda: socket.getaddrinfo('metadata.google.internal', 80))
for name, family, kind in (('vsock', 40, 1), ('packet', 17, 3), ('raw', 2, 3), ('alg', 38, 5)):
    tried(name, lambda: socket.socket(family, kind))
print(sorted(line.split(':')[0].strip() for line in open('/proc/net/dev').readlines()[2:]))
"""
    result = await attack(session, code, timeout_s=60.0)
    *tried, interfaces = result.stdout.splitlines()
    assert len(tried) == 3 * len(addresses) + 6
    assert "REACHED" not in result.stdout
    assert "lo" in eval(interfaces)
    assert "eth0" not in eval(interfaces)
    assert not host.visitors()


def host_addresses() -> list[str]:
    done = subprocess.run(["hostname", "-I"], capture_output=True, text=True, timeout=60, check=False)
    return [address for address in done.stdout.split() if ":" not in address]


async def test_attack_processes_of_other_users(session: Session, host: Host) -> None:
    code = f"""
import ctypes, os, signal
libc = ctypes.CDLL(None)
for pid in {[victim.pid for victim in host.victims] + [os.getpid()]!r}:
    for attempt in (lambda: os.kill(pid, signal.SIGKILL), lambda: os.killpg(pid, signal.SIGKILL)):
        try: print('KILLED', attempt())
        except OSError: pass
    if libc.ptrace(16, pid, 0, 0) == 0: print('TRACED')
    command = f'/proc/{{pid}}/cmdline'
    if os.path.exists(command) and b'pytest' in open(command, 'rb').read(): print('SEEN')
try: os.kill(-1, signal.SIGKILL)
finally: pass
"""
    result = await attack(session, code)
    assert result.stdout == ""
    assert [victim.poll() for victim in host.victims] == [None, None]


# ---- one box and another

OPEN_DOORS = f"""
import ctypes, os, socket, threading
libc = ctypes.CDLL(None)
doors = [socket.create_server(('0.0.0.0', 34567)), socket.create_server(('::', 34568), family=socket.AF_INET6)]
abstract = socket.socket(socket.AF_UNIX)
abstract.bind('\\0{MARK}-box')
abstract.listen()
for path in ('/tmp/{MARK}', '/dev/shm/{MARK}'):
    open(path, 'w').write('of one box')
print(libc.shmget(0x51515151, 4096, 0o1666) >= 0, libc.msgget(0x51515151, 0o1666) >= 0)
"""
TRY_DOORS = f"""{REACH}
import ctypes
libc = ctypes.CDLL(None)
tried('tcp', lambda: connect(('127.0.0.1', 34567)))
tried('abstract', lambda: connect('\\0{MARK}-box'))
tried('tmp', lambda: read('/tmp/{MARK}'))
tried('shm', lambda: read('/dev/shm/{MARK}'))
print(libc.shmget(0x51515151, 4096, 0) >= 0, libc.msgget(0x51515151, 0) >= 0)
commands = [open(f'/proc/{{pid}}/cmdline', 'rb').read() for pid in os.listdir('/proc') if pid.isdigit()]
print(sum(b'987654' in command for command in commands))
"""


async def test_attack_other_boxes(session: Session, target: Target) -> None:
    other = await target.sandbox.start("another box")
    try:
        for box, seconds in ((session, "987654"), (other, "987655")):
            await box.run_python(f"import subprocess\nsubprocess.Popen(['sleep', '{seconds}'])")
        uids = {uid for seconds in ("987654", "987655") for uid in uids_outside(f"sleep {seconds}")}
        opened = (await attack(session, OPEN_DOORS)).stdout.splitlines()
        *tried, system_v, processes = (await attack(other, TRY_DOORS, timeout_s=20.0)).stdout.splitlines()
    finally:
        await other.close()
    assert opened[0] == "True True" or target.backend == "docker" or target.counts_memory
    assert len(tried) == 4
    assert not [line for line in tried if "REACHED" in line]
    assert (system_v, processes) == ("False False", "0")
    assert len(uids) == 2 or target.backend == "docker" or os.geteuid() != 0


def uids_outside(command: str) -> set[int]:
    """The uids, on this machine, of the processes with this command line."""
    command_line = command.replace(" ", "\0").encode() + b"\0"
    uids = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process ended meanwhile
            if path.read_bytes() == command_line:
                uids.add(path.stat().st_uid)
    return uids


async def test_attack_sessions_cannot_be_guessed(target: Target, session: Session) -> None:
    """An id says nothing about the next one: whoever holds it holds the box."""
    other = await target.sandbox.start("next")
    try:
        assert len(session.session_id) >= 16
        assert session.session_id[:8] != other.session_id[:8]
    finally:
        await other.close()
