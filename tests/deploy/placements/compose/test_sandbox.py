"""What bubblewrap needs in a container: each of the two options that the service has, and no more than them."""

from __future__ import annotations

import subprocess

import pytest
from tests.deploy.placements.compose.stacks import BASE, why_not

from penstock.deploy.placements.compose.stack import FILES, IMAGE_USER

pytestmark = [pytest.mark.deep, pytest.mark.docker]
PLAIN = (
    *("run", "--rm", "--network", "none", "--read-only", "--tmpfs", "/tmp", "--user", f"{IMAGE_USER}:{IMAGE_USER}"),
    *("--cap-drop", "ALL", "--security-opt", "no-new-privileges:true", "--security-opt", "apparmor=unconfined"),
)
FILTER = ("--security-opt", f"seccomp={FILES / 'sandbox-seccomp.json'}")
PROC = ("--security-opt", "systempaths=unconfined")
BOX = (
    *("bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--cap-drop", "ALL"),
    *("--ro-bind", "/usr", "/usr", "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64"),
    *("--symlink", "usr/bin", "/bin", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),
    *("/usr/bin/python3", "-c"),
)


def in_container(*options: str, command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    if missing := why_not():
        pytest.skip(f"{missing}; scripts/setup-compose installs what is needed")
    argv = ["docker", *PLAIN, *options, BASE, *command]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ((), "No permissions to create new namespace"),
        (FILTER, "Can't mount proc"),
        (PROC, "No permissions to create new namespace"),
        ((*FILTER, *PROC), "a box"),
    ],
    ids=["neither", "filter", "proc", "both"],
)
def test_a_box_needs_both(options: tuple[str, ...], answer: str) -> None:
    done = in_container(*options, command=(*BOX, "print('a box')"))
    assert answer in done.stdout + done.stderr


def test_the_filter_refuses_what_no_box_is_built_with() -> None:
    """Outside of any box: what code would meet that has left one. The numbers are those of x86_64 and aarch64."""
    program = """
import ctypes, os, platform
libc = ctypes.CDLL(None, use_errno=True)
x86 = platform.machine() == "x86_64"
calls = {"ptrace": (101, 117), "bpf": (321, 280), "keyctl": (250, 219), "setns": (308, 268)}
calls |= {"userfaultfd": (323, 282), "io_uring_setup": (425, 425), "perf_event_open": (298, 241)}
calls |= {"chroot": (161, 51), "move_mount": (429, 429)}
for name, (on_x86, on_arm) in calls.items():
    ctypes.set_errno(0)
    libc.syscall(on_x86 if x86 else on_arm, -1, 0, 0, 0, 0)
    print(name, ctypes.get_errno())
print(os.open("/proc/sysrq-trigger", os.O_WRONLY) if os.access("/proc/sysrq-trigger", os.W_OK) else "no sysrq")
"""
    done = in_container(*FILTER, *PROC, command=("python3", "-c", program))
    *calls, last = done.stdout.splitlines()
    assert len(calls) == 9, done.stderr
    assert [line for line in calls if not line.endswith(" 1")] == []  # EPERM
    assert last == "no sysrq"
