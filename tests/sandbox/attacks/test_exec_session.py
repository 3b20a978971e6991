"""Images without python: no driver of ours in the box, each command started by the engine."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.sandbox.attacks.plants import SECRET, Host
from tests.sandbox.attacks.targets import CONFIG
from tests.sandbox.containers import PLAIN_IMAGE, make_plain_image
from tests.sandbox.orphans import MAKERS, MARK, Maker

from penstock.sandbox import RunResult, Sandbox, Session, make_sandbox

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.docker]
OWNER = f"attacks-plain-{os.getpid()}"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def plain() -> AsyncIterator[Sandbox]:
    make_plain_image()
    MAKERS.append(Maker(os.getpid(), OWNER))
    sandbox = make_sandbox(CONFIG.model_copy(update={"backend": "docker", "image": PLAIN_IMAGE}), OWNER)
    yield sandbox
    await sandbox.close()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def box(plain: Sandbox) -> Session:
    return await plain.start("attacked all along")


async def attack(box: Session, script: str, timeout_s: float = 20.0) -> RunResult:
    """Run it, then prove that the box serves the next command."""
    result = await box.run(["bash", "-c", script], timeout_s=timeout_s)
    assert (await box.run(["echo", "served"], timeout_s=30.0)).stdout == "served\n"
    return result


async def test_attack_first_process_without_a_driver(box: Session) -> None:
    """With the same uid, code could give it no time and then keep it busy: it would end, and we be blamed."""
    starve = "prlimit --pid 1 --cpu=1:1 && echo SET; kill -9 1; kill -STOP 1"
    speak = "for n in 0 1 2; do (: > /proc/1/fd/$n) 2> /dev/null && echo OPENED $n; done; timeout 2 yes > /proc/1/fd/0"
    result = await attack(box, f"{starve}; {speak}; true")
    assert result.stdout == ""
    assert not result.files_lost


@pytest.mark.deep
async def test_attack_fork_bomb(box: Session) -> None:
    result = await attack(box, "f() { f | f & }; f; sleep 60", timeout_s=1.0)
    assert result.limit == "wall" or result.exit_code != 0


@pytest.mark.deep
async def test_attack_memory_and_disk(box: Session) -> None:
    assert (await attack(box, "head -c 4G /dev/zero | tail -c 3G | wc -c")).limit == "memory"
    full = await attack(box, "head -c 10G /dev/zero > /tmp/f; stat -c %s /tmp/f; rm /tmp/f")
    assert "No space left" in full.stderr
    assert int(full.stdout) <= CONFIG.tmp_mb << 20


@pytest.mark.deep
async def test_attack_time(box: Session) -> None:
    for script in ("sleep infinity", "trap '' TERM INT HUP; sleep infinity", "kill -STOP $$"):
        result = await attack(box, script, timeout_s=0.5)
        assert (result.exit_code, result.limit) == (None, "wall")
    assert (await attack(box, "while :; do :; done", timeout_s=60.0)).limit == "cpu"


@pytest.mark.deep
async def test_attack_output(box: Session) -> None:
    flood = await attack(box, "yes", timeout_s=60.0)
    assert (flood.exit_code, flood.limit, len(flood.stdout)) == (None, "output", CONFIG.output_bytes)
    framed = await attack(box, r"printf '\1\0\0\0\0\0\0\4four\2\0\0\0\377\377\377\377'; exit 7")
    assert (framed.exit_code, framed.stderr) == (7, "")
    assert framed.stdout.startswith("\1\0\0\0\0\0\0\4four\2\0\0\0")


@pytest.mark.deep
async def test_attack_daemon_goes_with_limit_that_its_command_broke(box: Session) -> None:
    await attack(box, f"setsid sh -c 'while :; do sleep 1; done' {MARK} & sleep 60", timeout_s=0.5)
    assert (await box.run(["pgrep", "-f", MARK])).stdout == ""


async def test_attack_host(box: Session, host: Host) -> None:
    script = f"""
cat {host.folder}/checkpoint /etc/shadow
for port in {host.port} {host.redis_port}; do (: < /dev/tcp/127.0.0.1/$port) && echo REACHED $port; done
(: < /dev/tcp/169.254.169.254/80) && echo REACHED the metadata
unshare -Ur true && echo A NAMESPACE
touch /usr/x /x /sys/fs/cgroup/x && echo WROTE
env | grep PENSTOCK
kill -9 {host.victims[0].pid} {host.victims[1].pid} && echo KILLED
"""
    result = await attack(box, script)
    assert result.stdout == ""
    assert SECRET not in result.stderr
    assert not host.visitors()
    assert [victim.poll() for victim in host.victims] == [None, None]


@pytest.mark.deep
async def test_attack_files(box: Session, host: Host) -> None:
    await attack(box, f"cd /tmp; ln -s {host.folder} host; mkfifo pipe")
    for path in ("host/checkpoint", "../../etc/shadow", "pipe", "/dev/zero", "n" * 300, "a\0b", "", "."):
        with pytest.raises(OSError, match=r"\S"):
            await box.read_file(path)
        with pytest.raises(OSError, match=r"\S"):
            await box.write_file(path, b"x")
    assert (host.folder / "checkpoint").read_text() == SECRET
    for name in ("-rf", "a b", "new\nline", "'; true", "$(touch x)"):
        await box.write_file(name, name.encode())
        assert await box.read_file(name) == name.encode()
