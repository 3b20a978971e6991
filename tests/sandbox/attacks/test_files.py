"""The file routes: paths that lead elsewhere, names and files that are not what they seem."""

from __future__ import annotations

import pytest
from tests.sandbox.attacks.plants import SECRET, Host
from tests.sandbox.attacks.targets import attack
from tests.sandbox.backends import on_every_backend

from penstock.sandbox import Session

pytestmark = pytest.mark.asyncio(loop_scope="session")

AWAY = r"No such file|denied|Read-only|not permitted|not a regular file|/proc|No such device"


def links(host: Host) -> str:
    return f"""
import os
os.symlink('/etc', 'etc')
os.symlink({str(host.folder)!r}, 'host')
os.symlink({str(host.folder / "checkpoint")!r}, 'checkpoint')
os.symlink('/proc/1/root', 'root')
os.symlink('loop', 'loop')
os.symlink('.', 'here')
"""


SHADOWS = "/etc/shadow ../../etc/shadow etc/shadow /proc/1/root/etc/shadow root/etc/shadow here/here/../../etc/shadow"


async def test_attack_reading_the_hosts_shadow(session: Session, host: Host) -> None:
    await attack(session, links(host))
    for path in SHADOWS.split():
        with pytest.raises(OSError, match=AWAY):
            await session.read_file(path)


@on_every_backend
async def test_attack_reading_and_writing_the_trainers_files(session: Session, host: Host) -> None:
    await attack(session, links(host))
    climb = "../" * 12 + str(host.folder).lstrip("/")
    for path in ("checkpoint", "host/checkpoint", str(host.folder / "checkpoint"), f"{climb}/checkpoint"):
        with pytest.raises(OSError, match=AWAY):
            await session.read_file(path)
        with pytest.raises(OSError, match=AWAY):
            await session.write_file(path, b"overwritten")
    with pytest.raises(OSError, match=AWAY):
        await session.write_file("host/new", b"x")
    assert (host.folder / "checkpoint").read_text() == SECRET
    assert not (host.folder / "new").exists()


async def test_attack_writing_to_the_system(session: Session) -> None:
    for path in ["/usr/x", "/bin/sh", "/dev/x", "/sys/x", "/x", "/lib/x", "../usr/x", "/etc/ld.so.cache"]:
        with pytest.raises(OSError, match=r"Read-only|No such file|denied|not permitted"):
            await session.write_file(path, b"x")


async def test_attack_first_process_cannot_be_reached_by_its_own_proc(session: Session) -> None:
    """Files are opened by the box's first process: its /proc/self is not that of the code."""
    await attack(session, "import os\nos.symlink('/proc/self/oom_score_adj', 'adj')\nos.symlink('/dev/fd/2', 'err')")
    for path in [
        "/proc/self/oom_score_adj",
        "/proc/self/mem",
        "/proc/self/environ",
        "/proc/1/fd/0",
        "/proc/self/fd/3",
        "adj",
        "/dev/stderr",
        "/dev/fd/2",
        "/proc/self/fd/2",
        "err",
    ]:
        with pytest.raises(OSError, match=AWAY):
            await session.write_file(path, b"1000")
        with pytest.raises(OSError, match=AWAY):
            await session.read_file(path)


async def test_attack_what_is_no_file_is_refused_at_once(session: Session) -> None:
    """A pipe without a writer or a device without an end would hold the box up for ever."""
    await attack(
        session, "import os, socket\nos.mkfifo('pipe')\nos.mkdir('dir')\nsocket.socket(socket.AF_UNIX).bind('socket')"
    )
    for path in ("pipe", "dir", "socket", "/dev/zero", "/dev/random", "/dev/null", "."):
        with pytest.raises(OSError, match=r"regular|directory|No such device|denied|Read-only"):
            await session.read_file(path)
        with pytest.raises(OSError, match=r"regular|directory|No such device|denied|Read-only"):
            await session.write_file(path, b"x")


async def test_attack_links_in_a_circle(session: Session, host: Host) -> None:
    await attack(session, links(host))
    with pytest.raises(OSError, match="symbolic links"):
        await session.read_file("loop")


NO_NAMES = {
    "n" * 256: "too long",
    "n/" * 3000: "too long",
    "n" * 200_000: "too long",
    "a\0b": "NUL|null|No such file",
    "": "No such file",
    "\ud800": "surrogates",
}
STRANGE_NAMES = [
    "n" * 255,
    "a b",
    "-rf",
    "new\nline",
    "\x1b[31mred",
    "%2e%2e%2f",
    "a?b=c&d#e",
    "ünïcödé",
    "...",
    "\\",
    "'; true",
]


async def test_attack_names_that_no_file_can_have(session: Session) -> None:
    for name, reason in NO_NAMES.items():
        with pytest.raises(OSError, match=reason):
            await session.read_file(name)
        with pytest.raises(OSError, match=reason):
            await session.write_file(name, b"x")


async def test_attack_strange_names_are_names(session: Session) -> None:
    for name in STRANGE_NAMES:
        await session.write_file(name, name.encode())
    for name in STRANGE_NAMES:
        assert await session.read_file(name) == name.encode()
    listed = (await session.run_python("import os\nprint(ascii(sorted(os.listdir('/tmp'))))")).stdout
    assert listed == f"{sorted(STRANGE_NAMES)!a}\n"


async def test_attack_file_larger_than_it_is(session: Session) -> None:
    """A terabyte of holes: only what was asked for comes, and no more memory than that is used."""
    await attack(
        session, "import os\nwith open('holes', 'wb') as file: file.write(b'start'); os.truncate('holes', 10 << 20)"
    )
    await attack(session, "with open('endless', 'wb') as file: file.seek(1 << 40); file.write(b'x')")
    assert await session.read_file("holes", 100) == b"start".ljust(100, b"\0")
    assert len(await session.read_file("endless")) == 1 << 20


async def test_attack_folder_that_is_deeper_than_a_path(session: Session) -> None:
    code = """
import os
for _ in range(2000):
    os.mkdir('d' * 50)
    os.chdir('d' * 50)
open('bottom', 'w').close()
os.chdir('/tmp')
"""
    assert (await attack(session, code)).stderr == ""
    with pytest.raises(OSError, match="too long"):
        await session.read_file(("d" * 50 + "/") * 2000 + "bottom")


async def test_attack_file_that_changes_while_it_is_read(session: Session) -> None:
    code = """
import os
if os.fork() == 0:
    while True:
        for target in ('/etc/shadow', '/proc/1/environ', 'a'):
            try:
                os.symlink(target, 'next')
                os.rename('next', 'swapped')
            except OSError: pass
open('a', 'w').write('own')
"""
    await attack(session, code)
    seen = set()
    for _ in range(50):
        try:
            seen.add(await session.read_file("swapped"))
        except OSError:
            continue
    assert seen <= {b"own"}
