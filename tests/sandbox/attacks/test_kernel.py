"""The kernel's doors: namespaces, tracing, limits of other processes, cgroups, set-uid programs, core dumps."""

from __future__ import annotations

import pytest
from tests.sandbox.attacks.targets import attack
from tests.sandbox.backends import on_every_backend

from penstock.sandbox import Session

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_attack_system_calls_that_no_box_needs(session: Session) -> None:
    code = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print([libc.unshare(0x10000000), libc.unshare(0x20000), libc.mount(b'none', b'/tmp', b'tmpfs', 0, 0), libc.setns(3, 0)])
print([libc.syscall(n, 0, 0, 0, 0, 0) for n in (425, 321, 250, 248, 323, 298, 435, 442, 428, 430)])
print(libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0))
print([libc.syscall(169, 0xfee1dead, 672274793, 0x1234567), libc.syscall(103, 3, 0, 0), libc.syscall(161, b'/tmp')])
"""
    lines = (await attack(session, code)).stdout.splitlines()
    assert [set(eval(f"[{line}]" if line[0] != "[" else line)) for line in lines] == [{-1}] * 4


async def test_attack_asking_what_other_boxes_read(session: Session) -> None:
    """All boxes see the same pages of /usr: what one reads, another one could tell by these."""
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print([libc.inotify_init1(0), libc.mincore(0, 0, 0), libc.inotify_init()])
file = os.open('/usr/bin/env', os.O_RDONLY)
for ask in (lambda: os.preadv(file, [bytearray(1)], 0, os.RWF_NOWAIT), lambda: os.posix_fadvise(file, 0, 0, 4)):
    try: print(ask())
    except OSError as error: print(error.errno)
print(os.preadv(file, [bytearray(4)], 0))
"""
    lines = (await attack(session, code)).stdout.splitlines()
    assert lines == ["[-1, -1, -1]", "1", "None", "4"]


async def test_attack_nested_user_namespaces(session: Session) -> None:
    result = await session.run(["unshare", "-Urmpf", "sh", "-c", "id -u; mount -t tmpfs none /mnt && echo MOUNTED"])
    assert result.exit_code != 0
    assert result.stdout == ""
    assert (await session.run(["sh", "-c", "unshare -Ur true || setpriv --reuid=0 true || chroot /tmp true"])).exit_code


async def test_attack_what_ordinary_code_needs_still_works(session: Session) -> None:
    """A filter that forbids too much is no wall either: threads, processes, pipes, sockets of its own."""
    code = """
import socket, subprocess, threading, multiprocessing.pool
thread = threading.Thread(target=lambda: print('thread', flush=True))
thread.start()
thread.join()
print(subprocess.run(['sh', '-c', 'echo $((6 * 7)) | cat'], capture_output=True, text=True).stdout.strip())
print(sum(multiprocessing.pool.ThreadPool(2).map(abs, [-1, -2])))
server = socket.create_server(('127.0.0.1', 0))
client = socket.create_connection(server.getsockname())
server.accept()[0].sendall(b'own loopback')
print(client.recv(100).decode())
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    result = await attack(session, code)
    assert result.stdout.splitlines() == ["thread", "42", "3", "own loopback", "(64, 64)"], result.stderr


@on_every_backend
async def test_attack_first_process_cannot_be_ended_stopped_or_traced(session: Session) -> None:
    code = """
import ctypes, os
for number in range(1, 65):
    try: os.kill(1, number)
    except OSError: pass
for name in ('mem', 'environ', 'fd/0', 'fd/3', 'root/tmp', 'oom_score_adj', 'cwd/x', 'map_files'):
    try:
        open('/proc/1/' + name, 'r+b')
        print('OPENED', name)
    except OSError:
        pass
try: print(os.listdir('/proc/1/fd'))
except OSError: pass
libc = ctypes.CDLL(None)
buffer = (ctypes.c_size_t * 2)(0, 8)
print(libc.ptrace(16, 1, 0, 0), libc.syscall(438, os.pidfd_open(1), 0, 0))
print(libc.process_vm_readv(1, buffer, 1, buffer, 1, 0), libc.process_vm_writev(1, buffer, 1, buffer, 1, 0))
"""
    assert (await attack(session, code)).stdout == "-1 -1\n-1 -1\n"
    result = await attack(session, "import os\ntry: os.kill(-1, 9)\nfinally: os.kill(os.getpid(), 9)")
    assert (result.exit_code, result.state_lost) == (-9, True)


async def test_attack_first_process_cannot_be_starved_by_its_limits(session: Session) -> None:
    """prlimit() asks for nothing but the same uid: with it code could end the box and have us blamed."""
    code = """
import resource
for name in ('CPU', 'AS', 'DATA', 'STACK', 'NOFILE', 'FSIZE', 'NPROC', 'MEMLOCK'):
    try:
        resource.prlimit(1, getattr(resource, 'RLIMIT_' + name), (0, 0))
        print('SET', name)
    except (OSError, ValueError): pass
print('y' * 1_000_000)
"""
    result = await attack(session, code)
    assert "SET" not in result.stdout
    await session.write_file("a", b"1")
    assert await session.read_file("a") == b"1"


async def test_attack_lowering_the_drivers_priority(session: Session) -> None:
    code = """
import os
for attempt in (lambda: os.setpriority(os.PRIO_USER, 0, 19), lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
                lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)),
                lambda: os.sched_setaffinity(1, {0}), lambda: os.sched_setaffinity(0, {0})):
    try: attempt()
    except OSError: pass
for _ in range(20):
    if os.fork() == 0:
        while True: pass
while True: pass
"""
    result = await attack(session, code, timeout_s=0.7)
    assert (result.exit_code, result.limit, result.state_lost) == (None, "wall", True)


async def test_attack_own_limits_cannot_be_raised(session: Session) -> None:
    code = """
import os, resource
for name in ('CPU', 'NOFILE', 'CORE'):
    what = getattr(resource, 'RLIMIT_' + name)
    soft, hard = resource.getrlimit(what)
    try:
        resource.setrlimit(what, (hard + 1, hard + 1))
        print('RAISED', name)
    except (ValueError, OSError): pass
try:
    os.nice(-15)
    print('NICER')
except OSError: pass
"""
    assert (await attack(session, code)).stdout == ""


SETTINGS = """
import os
def may_write(path):
    try: os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY))
    except OSError: return False
    return True
def may_set(path):
    try:
        with open(path, 'r+b', buffering=0) as file:
            value = file.read(4096)
            file.seek(0)
            file.write(value)
    except (OSError, ValueError): return False
    return True
def under(top, depth):
    for folder, folders, files in os.walk(top):
        if folder.count('/') >= depth: folders.clear()
        yield from (os.path.join(folder, name) for name in files)
for path in [*under('/sys/fs/cgroup', 7), *under('/proc/sys', 5), *under('/sys/kernel', 5)]:
    if may_set(path): print('setting', path)
if may_write('/proc/sysrq-trigger'): print('setting sysrq')
for path in map('/dev/'.__add__, os.listdir('/dev')):
    if may_write(path) and not os.path.islink(path): print('device', path)
for folder in '/usr /usr/lib /bin / /dev /etc /lib /sys /sys/fs/cgroup /run /var /opt /mnt /root /home /proc'.split():
    try:
        open(os.path.join(folder, 'x'), 'w')
        print('wrote', folder)
    except OSError: pass
for kind, major, minor in ((0o60666, 8, 0), (0o20666, 1, 1)):
    try:
        os.mknod('/tmp/device', kind, os.makedev(major, minor))
        print('made a device')
    except OSError: pass
"""
HARMLESS_DEVICES = {f"device /dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty", "ptmx")}
OWN_SETTINGS = (
    "setting /proc/sys/fs/mqueue/",
    *(f"setting /proc/sys/kernel/{n}" for n in ("msg", "sem", "shm", "auto_msg", "pid_max")),
)
"""Of the box's own namespaces; what they allow counts against its memory and processes all the same."""


async def test_attack_writing_cgroups_kernel_settings_and_devices(session: Session) -> None:
    lines = (await attack(session, SETTINGS, timeout_s=20.0)).stdout.splitlines()
    assert "device /dev/null" in lines
    assert not {line for line in lines if not line.startswith(OWN_SETTINGS)} - HARMLESS_DEVICES


async def test_attack_becoming_root(session: Session) -> None:
    """Set-uid programs give nothing, and no call changes who code is."""
    code = """
import glob, os, stat, subprocess
print(os.getuid() != 0, os.geteuid() != 0)
to_zero = lambda: os.setresuid(0, 0, 0)
for attempt in (lambda: os.setuid(0), lambda: os.setgroups([0]), to_zero, lambda: os.chroot('/tmp')):
    try: print('CHANGED', attempt())
    except OSError: pass
status = dict(line.split(':\\t') for line in open('/proc/self/status').read().splitlines() if ':\\t' in line)
print(status['NoNewPrivs'], status['Seccomp'], [int(status['Cap' + kind], 16) for kind in ('Prm', 'Eff', 'Bnd')])
for path in glob.glob('/usr/bin/*'):
    if os.path.basename(path) in ('su', 'mount', 'newgrp') and os.stat(path).st_mode & stat.S_ISUID:
        done = subprocess.run([path, '-c', 'id -u', 'root'], input='', capture_output=True, text=True, timeout=5)
        if done.stdout.strip() == '0': print('ROOT BY', path)
"""
    lines = (await attack(session, code, timeout_s=20.0)).stdout.splitlines()
    assert lines == ["True True", "1 2 [0, 0, 0]"]


async def test_attack_crash_leaves_no_core(session: Session) -> None:
    """A limit of one byte, not none: a handler that the host set up by a pipe is kept from it by that value alone."""
    code = "import resource\nprint(resource.getrlimit(resource.RLIMIT_CORE))\nimport os\nos.abort()"
    result = await attack(session, code)
    assert (result.stdout, result.exit_code, result.state_lost) == ("(1, 1)\n", -6, True)
    left = await session.run_python("import os\nprint(os.listdir('/tmp'))")
    assert left.stdout == "[]\n"


async def test_attack_typing_into_a_terminal_that_is_not_there(session: Session) -> None:
    code = """
import fcntl, os, termios
for path in ('/dev/tty', '/dev/console', '/dev/tty0', '/dev/pts/0', '/dev/stdin'):
    try:
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(fd, termios.TIOCSTI, b'x')
        print('TYPED', path)
    except OSError: pass
"""
    assert (await attack(session, code)).stdout == ""
