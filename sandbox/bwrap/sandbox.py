"""Boxes made by bubblewrap: own namespaces, no network, read-only root, private /tmp, a uid and cgroups of their own.

    worker ─► bwrap ─► zygote ─clone─► driver (pid 1 in the box)

Where a zygote cannot make boxes, each is started by itself, with the same walls:

    worker ─► sh (enters the cgroups) ─► setpriv (takes the box's uid) ─► bwrap ─► driver (pid 1 in the box)

All four are one process that execs on, but for bwrap's monitor. The worker's death closes the driver's socket and
reaches bwrap by ``--die-with-parent``: either ends the whole box.
"""

from __future__ import annotations

import base64
import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from penstock.sandbox.bundle import ZYGOTE_MODULES, compile_driver, driver_command, open_blobs
from penstock.sandbox.bwrap.cgroups import open_cgroups
from penstock.sandbox.bwrap.process_box import BoxCommand, ProcessBox
from penstock.sandbox.bwrap.zygote import ForkedBox, Zygote, why_no_zygote
from penstock.sandbox.config import SandboxConfig
from penstock.sandbox.inside import memory
from penstock.sandbox.limited import DriverSandbox, SessionSlot, shared_folders
from penstock.sandbox.protocol import OWN_FOLDERS, SandboxError, Session
from penstock.sandbox.seccomp import build_filter
from penstock.sandbox.snapshots import TMP, BoxCopy, copy_folders
from penstock.sandbox.uids import UidBlocks

logger = logging.getLogger(__name__)

PYTHON = "/usr/bin/python3"
"""The system's: the interpreter that runs Penstock may lie where a box's uid cannot read."""
UID_BASE = 1_879_048_192
"""Above every range that distributions and container engines hand out; 16 Mi uids from here."""
_UIDS = UidBlocks(UID_BASE, 1024, 16384)
INSIDE_UID = 1000
"""Uid of the code in every box, with any uid outside."""
_NAMES = (
    f"root:x:0:0::/root:/bin/sh\nbox:x:{INSIDE_UID}:{INSIDE_UID}::/tmp:/bin/sh\n".encode(),
    f"root:x:0:\nbox:x:{INSIDE_UID}:\n".encode(),
)
_NAMES_FILES = ["--perms", "0444", "--file", "{2}", "/etc/passwd", "--perms", "0444", "--file", "{3}", "/etc/group"]
"""Programs refuse to run as a user without a name (initdb of PostgreSQL, ssh)."""
_SHM_BYTES = 16 << 20

_UNMAPPED_ZERO = " --dev-bind /dev/full /dev/zero"
"""Reads the same; a shared map of the real one would be memory that no process and no file shows."""

DELEGATE = "delegate a cgroup v2 (`systemd-run --user --scope -p Delegate=yes penstock …`)"
_ENVIRONMENT = "--clearenv --setenv PATH /usr/bin:/bin --setenv HOME /tmp --setenv LANG C.UTF-8"


class BwrapSandbox(DriverSandbox):
    """Maker of bubblewrap boxes for one worker process. `containment` says in words which walls stand."""

    def __init__(self, config: SandboxConfig, owner: str) -> None:
        """Clears away what a killed process of the same `owner` left, then proves that a box can be made here.

        Raises:
            SandboxError: it cannot; the message names the fix.
        """
        super().__init__(config)
        self._features = probe()
        # `sandbox.folders`, read-only.
        arguments: list[str] = []
        for inside, here in shared_folders(config).items():
            for parent in reversed(PurePosixPath(inside).parents[:-1]):
                arguments += ["--perms", "0755", "--dir", str(parent)]
            arguments += ["--ro-bind", here, inside]
        self._folders = arguments
        self._cgroups, self._why_no_cgroups = open_cgroups(owner, config)
        if self._cgroups is not None and (count := self._cgroups.reap()):
            logger.warning("sandbox: cleared away %d boxes that an earlier process of %s left", count, owner)
        self._filter = build_filter(countable=self._cgroups is None)
        self._why_uncounted = "" if self._cgroups else self._prove_countable()
        if self._why_uncounted and not config.memory_unbounded:
            raise SandboxError(
                f"the memory of a box cannot be bounded here: no cgroup ({self._why_no_cgroups}), and"
                f" {self._why_uncounted}; {DELEGATE}, or accept it with sandbox.memory_unbounded: true"
            )
        command = self._zygote_command()
        self._why_no_zygote = why_no_zygote(command, _uid(0))
        if self._why_no_zygote and config.own_root:
            raise SandboxError(f"sandbox.own_root needs boxes forked by a zygote: {self._why_no_zygote}")
        self._zygote = None if self._why_no_zygote else Zygote(command)
        self._driver = compile_driver(PYTHON) if self._zygote is None else b""
        self.containment = self._describe()
        if self._why_no_zygote:
            logger.info("sandbox: bwrap starts each box by itself, which takes longer: %s", self._why_no_zygote)
        logger.log(logging.INFO if self._cgroups else logging.WARNING, "sandbox: %s", self.containment)

    def _limits_of_needs(self) -> Iterator[tuple[str, str, float]]:
        """All boxes have the limits of the settings: a session may not ask for more, and gets no less."""
        yield from super()._limits_of_needs()
        for name, setting in (("memory_mb", "memory_mb"), ("cpus", "cpus"), ("storage_mb", "tmp_mb")):
            yield name, f"sandbox.{setting}", getattr(self.config, setting)

    async def _copy(self, session: Session, slot: SessionSlot) -> BoxCopy:
        """The folders of a box with its own root are parts of /tmp."""
        return BoxCopy(await copy_folders(session, [TMP]), slot.image, slot.needs)

    async def close(self) -> None:
        await super().close()
        if self._zygote is not None:
            await self._zygote.close()
        if self._cgroups is not None:
            self._cgroups.close()

    async def _launch(self, slot: SessionSlot) -> ProcessBox:
        try:
            cgroup = self._cgroups.make(slot.slot, slot.needs.clean_cache) if self._cgroups else None
        except OSError as error:
            raise SandboxError(f"the box's cgroup cannot be made: {error}") from error
        if self._zygote is not None:
            return await ForkedBox.fork(self._zygote, _uid(slot.slot), cgroup)
        box = [*_as_uid(slot.slot), *self._bwrap(_NAMES_FILES)]
        argv = [*box, "--", *driver_command(PYTHON, self._settings(), "{0}")]
        blobs = [self._driver, self._filter or b"", *_NAMES]
        if cgroup is not None:
            enter = 'while [ "$1" != -- ]; do echo $$ > "$1" || exit 125; shift; done; shift; exec "$@"'
            argv = ["/bin/sh", "-c", enter, "box", *cgroup.join_files, "--", *argv]
        return await ProcessBox.start(BoxCommand(tuple(argv), tuple(blobs), cgroup=cgroup))

    def _prove_countable(self) -> str:
        """Why the first process of a box cannot count what the box holds; empty if it can."""
        if self._filter is None:
            return f"no system-call filter is known for {platform.machine()}"
        source = Path(memory.__file__).read_text(encoding="utf-8")
        prove = f"{source}\ntry: require_countable()\nexcept UncountableMemory as error: raise SystemExit(str(error))"
        with open_blobs([self._filter]) as programs:
            box = [part.replace("{1}", str(programs[0])) for part in self._bwrap()]
            return _run_box([*_as_uid(0), *box, "--", PYTHON, "-I", "-S", "-c", prove], programs) or ""

    def _bwrap(self, names: Sequence[str] = ()) -> list[str]:
        walls = "--unshare-all --unshare-user --die-with-parent --new-session --as-pid-1 --cap-drop ALL"
        walls += f" --uid {INSIDE_UID} --gid {INSIDE_UID}"
        # without the two remounts /dev and the root itself would be writable, unlimited memory file systems
        files = (
            f"--proc /proc --dev /dev --size {_SHM_BYTES} --tmpfs /dev/shm"
            f" --size {self.config.tmp_mb << 20} --tmpfs /tmp --remount-ro /dev --remount-ro / --chdir /tmp"
        )
        if self._cgroups is None:
            files += _UNMAPPED_ZERO
        options = [*walls.split(), "--hostname", "sandbox", *self._features, *_ENVIRONMENT.split()]
        seccomp = ["--seccomp", "{1}"] if self._filter is not None else []
        return ["bwrap", *options, *_system_folders(), *self._folders, *names, *files.split(), *seccomp]

    def _zygote_command(self) -> BoxCommand:
        walls = ["--die-with-parent", "--new-session", "--cap-add", "ALL"]
        options = [*walls, *([] if os.geteuid() == 0 else ["--unshare-user"]), *_ENVIRONMENT.split()]
        own = OWN_FOLDERS if self.config.own_root else ()
        folders = [part for folder in ("/etc", *own) for part in ("--perms", "0755", "--dir", folder)]
        # The machine's /proc: the zygote shares the worker's pids, and the kernel allows a box a /proc only next to a
        # whole one. Each box mounts its own /proc, /dev/shm, /dev/pts and /tmp over these.
        mounts = "--bind /proc /proc --dev /dev --dir /tmp --remount-ro /dev --remount-ro / --chdir /"
        files = [*folders, *_system_folders(), *self._folders, *_NAMES_FILES, *mounts.split()]
        sizes = {"shm_bytes": _SHM_BYTES, "tmp_bytes": self.config.tmp_mb << 20}
        settings = {**self._settings(), **sizes, "own_folders": own, "uid": INSIDE_UID}
        settings["worker"] = os.getpid()  # names whose it is in a list of processes
        if self._cgroups is None:
            files += _UNMAPPED_ZERO.split()
        if self._filter is not None:
            settings["filter"] = base64.b64encode(self._filter).decode("ascii")
        argv = ["bwrap", *options, *files, "--", *driver_command(PYTHON, settings, "{0}"), "{1}"]
        return BoxCommand(tuple(argv), (compile_driver(PYTHON, ZYGOTE_MODULES), *_NAMES))

    def _settings(self) -> dict[str, object]:
        """Without cgroups: memory counted by the driver, and by rlimits per process; processes per user namespace."""
        settings: dict[str, object] = {
            "boxed": True,
            "cpu_s": self.config.cpu_s,
            "output_bytes": self.config.output_bytes,
        }
        if self._cgroups is None:
            settings |= {"processes": self.config.pids, "address_space": self.config.memory_mb << 20}
            if not self._why_uncounted:
                # of one socket: the kernel takes what is asked for twice, for its own book-keeping
                send_bytes = 2 * int(Path("/proc/sys/net/core/wmem_max").read_text(encoding="ascii"))
                settings |= {"memory_bytes": self.config.memory_mb << 20, "send_bytes": send_bytes}
        return settings

    def _describe(self) -> str:
        walls = ["bwrap: no network, read-only root, private /tmp"]
        walls.append("a uid per box" if os.geteuid() == 0 else f"uid {os.geteuid()} for all boxes (not root)")
        walls.append("seccomp" if self._filter is not None else "no seccomp filter for this architecture")
        if "--disable-userns" not in self._features:
            walls.append("nested user namespaces are held by seccomp alone (bwrap older than 0.8)")
        if self._cgroups is not None:
            limited = "memory, processes and CPU" if self._cgroups.limits_cpu else "memory and processes, not for CPU"
            walls.append(f"cgroup v{self._cgroups.version} for {limited}")
        elif not self._why_uncounted:
            counted = "memory counted by the box's first process, processes by rlimit, CPU share not limited"
            walls.append(f"no cgroup ({self._why_no_cgroups}): {counted}")
        else:
            weaker = "rlimits only: memory is limited per process, not per box, and CPU share not at all"
            walls.append(f"{weaker} ({self._why_no_cgroups}; {self._why_uncounted})")
        return "; ".join(walls)


def _uid(slot: int) -> int | None:
    """One that no other box on this machine has at this time; None if this process is not root: all have its own.

    Raises `SandboxError` where all are taken.
    """
    return None if os.geteuid() != 0 else _UIDS.uid(slot)


def _as_uid(slot: int) -> list[str]:
    """bwrap as real root would only relabel root. Empty if this process is not root."""
    uid = _uid(slot)
    if uid is None:
        return []
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--no-new-privs"]


def _system_folders() -> list[str]:
    """/usr read-only, and /bin, /lib ... as this system has them: links into /usr, or folders."""
    arguments = ["--ro-bind", "/usr", "/usr"]
    for path in map(Path, ("/bin", "/sbin", "/lib", "/lib64")):
        if path.is_symlink():
            arguments += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            arguments += ["--ro-bind", str(path), str(path)]
    for path in map(Path, ("/etc/alternatives", "/etc/ld.so.cache")):
        arguments += ["--ro-bind-try", str(path), str(path)]
    return arguments


def probe() -> tuple[str, ...]:
    """Makes one empty box; returns options of newer versions. Raises `SandboxError`, which names the fix."""
    if shutil.which("bwrap") is None:
        raise SandboxError("bubblewrap is missing: `apt-get install bubblewrap` (or `dnf install bubblewrap`)")
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        raise SandboxError("setpriv is missing: `apt-get install util-linux`")
    first = _try_box("--disable-userns")
    if first is None:
        return ("--disable-userns",)
    second = _try_box()
    if second is None:
        return ()
    raise SandboxError(
        f"bwrap cannot make a box here ({second}); allow user namespaces: `sysctl -w user.max_user_namespaces=10000`,"
        " on Debian also `kernel.unprivileged_userns_clone=1`, on Ubuntu 24.04"
        " `kernel.apparmor_restrict_unprivileged_userns=0`; in Docker start the container with"
        " `--security-opt seccomp=unconfined --security-opt systempaths=unconfined`"
    )


def _try_box(*options: str) -> str | None:
    """None if it worked, else the output of bwrap."""
    box = ["bwrap", "--unshare-all", "--unshare-user", *options, *_system_folders(), "--proc", "/proc", "--dev", "/dev"]
    return _run_box([*_as_uid(0), *box, "--", "/usr/bin/true"])


def _run_box(command: list[str], descriptors: Sequence[int] = ()) -> str | None:
    """None if it ended with 0, else its stderr."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=20, check=False, pass_fds=descriptors
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr.decode("utf-8", "replace").strip() or f"exit {done.returncode}"
