"""Checks of the sandbox: a box starts, and contains three attacks from inside: network, fork bomb, host files.

The code in the box reports what it could do; real listeners outside also observe what it reached on the network.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from penstock.agent_loops import LoadError, load_object
from penstock.datasets import HARBOR
from penstock.deploy.config import RunConfig
from penstock.deploy.preflight.check import Check, skipped
from penstock.deploy.preflight.data import rewards_of
from penstock.deploy.run.connection import TOKEN_VARIABLE
from penstock.sandbox import ExceededSetting, Sandbox, SandboxError, Session, UnmetNeeds
from penstock.sandbox.harbor import HarborTask, HarborTaskError, check_pids, tasks_of
from penstock.tools import ToolConfigError, need_sandbox

OWNER = "doctor"
ANSWER_DEADLINE_S = 10.0


def open_sandbox(config: RunConfig) -> Sandbox:
    """Open the sandbox as a worker does; a server's token is the run's, from the environment. Raises `SandboxError`."""
    from penstock.sandbox import make_sandbox

    return make_sandbox(config.sandbox, OWNER, os.environ.get(TOKEN_VARIABLE))


async def _try(config: RunConfig) -> None:
    """Raises `SandboxError` if no box can be had, or a server does not answer or refuses the token."""
    sandbox = open_sandbox(config)
    try:
        if config.sandbox.backend == "remote":
            from penstock.sandbox import RemoteSandbox

            assert isinstance(sandbox, RemoteSandbox)
            await sandbox.client.request("GET", "/health", ANSWER_DEADLINE_S)
    finally:
        await sandbox.close()


def tools_need_boxes(config: RunConfig) -> bool:
    """False for tools of which one cannot be loaded: `check_template` reports it, without a box."""
    try:
        return need_sandbox(config.tools, partial(load_object, recipe_dir=Path.cwd()))
    except (LoadError, ToolConfigError):
        return False


def needs_boxes(config: RunConfig) -> bool:
    return tools_need_boxes(config) or "command" in config.agent.loops or "code" in rewards_of(config)


def check_sandbox(config: RunConfig) -> Check | None:
    if not needs_boxes(config):
        return None
    try:
        asyncio.run(_try(config))
    except SandboxError as error:
        return Check("sandbox", False, str(error), _fix(str(error)))
    return Check("sandbox", True, config.sandbox.backend)


def _fix(problem: str) -> str:
    if problem.startswith("sandbox.folders"):
        return "make that folder, or correct sandbox.folders; a relative path lies in the current directory"
    return "install what it names, or set another sandbox.backend"


def check_harbor_tasks(config: RunConfig) -> Check | None:
    """The boxes that Harbor's tasks require: without them each episode would fail at its first call."""
    specs = [spec for spec in (config.data.train, config.data.eval) if spec is not None and spec.startswith(HARBOR)]
    if not specs or not needs_boxes(config):
        return None
    try:
        check_pids(config.sandbox)
    except HarborTaskError as error:
        problem, _, fix = str(error).rpartition(": ")
        return Check("tasks' boxes", False, problem, fix)
    try:
        tasks = [task for spec in specs for task in tasks_of(Path(spec.removeprefix(HARBOR)))]
        sandbox, problems = open_sandbox(config), []
        try:
            for task in tasks:
                try:
                    sandbox.check_needs(task.needs)
                except SandboxError as error:
                    problems.append((task, error))
        finally:
            asyncio.run(sandbox.close())
    except (HarborTaskError, SandboxError):
        return None  # `check_data` and `check_sandbox` say so
    if problems:
        refused, fix = _too_small(problems)
        refused = f"{len(problems)} of {len(tasks)} tasks cannot have their box: {refused}"
        return Check("tasks' boxes", False, refused, f"{fix}, or leave these tasks out")
    return Check("tasks' boxes", True, f"{len(tasks)} tasks can have theirs")


def _too_small(problems: Sequence[tuple[HarborTask, SandboxError]]) -> tuple[str, str]:
    """(what the tasks ask for and do not get, a sentence per need; the fix of all)"""
    groups = dict[str, list[tuple[HarborTask, Sequence[ExceededSetting]]]]()
    for task, error in problems:
        exceeded = error.exceeded if isinstance(error, UnmetNeeds) else ()
        for need in dict.fromkeys(one.need for one in exceeded) or [str(error)]:
            groups.setdefault(need, []).append((task, [one for one in exceeded if one.need == need]))
    sentences, fixes = [], []
    for need, group in groups.items():
        first = group[0][0].name
        who = f"{first} and {len(group) - 1} other{'s' * (len(group) > 2)}" if len(group) > 1 else first
        settings = {one.setting: one.limit for _, exceeded in group for one in exceeded}
        if not settings:
            sentences.append(f"{who}: {need}")
            continue
        amounts = {one.amount for _, exceeded in group for one in exceeded}
        limits = " and ".join(f"{setting} is {limit:g}" for setting, limit in settings.items())
        amount = f"environment.{need} {'up to ' * (len(amounts) > 1)}{max(amounts):g}"
        sentences.append(f"task.toml of {who} asks for {amount}; {limits}")
        fixes += [f"set {setting}={max(amounts):g}" for setting in settings]
    return "; ".join(sentences), " and ".join(fixes) or "change what it names"


OUTSIDE = ("1.1.1.1", 53)
"""A name server that everybody reaches who reaches the internet; connected to, never asked."""
NO_PYTHON = "no python3"
"""Error of a box whose image has no Python."""
BACKEND = "use sandbox.backend=bwrap or docker on this machine, or remote with a server that does"
_CONNECT = """
import socket
for address in {addresses!r}:
    try:
        socket.create_connection(tuple(address), timeout=2).close()
        print('REACHED', address)
    except OSError as error:
        print('walled', type(error).__name__)
"""
_FORK = """
import os, time
children = []
try:
    for _ in range({tries}):
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        children.append(child)
    print('UNLIMITED', len(children))
except OSError:
    print('walled', len(children))
finally:
    for child in children:
        os.kill(child, 9)
        os.waitpid(child, 0)
"""
_READ = """
import os
found = []
for path in {paths!r}:
    try:
        with open(path, 'rb') as file:
            file.read(1)
        found.append(path)
    except OSError:
        pass
for entry in os.listdir('/proc'):
    try:
        with open('/proc/' + entry + '/environ', 'rb') as file:
            if entry.isdigit() and b'PENSTOCK_TOKEN=' in file.read():
                found.append('environment of process ' + entry)
    except OSError:
        pass
print('READ' if found else 'walled', ', '.join(found))
"""


def check_containment(config: RunConfig) -> list[Check]:
    if not needs_boxes(config):
        return []
    try:
        return asyncio.run(_attack(config))
    except SandboxError as error:
        if NO_PYTHON in str(error):
            return [skipped("containment", f"the attacks are written in Python: {error}")]
        return [Check("containment", False, f"no box to attack from: {error}", "see the check `sandbox`")]


async def _attack(config: RunConfig) -> list[Check]:
    sandbox = open_sandbox(config)
    try:
        session = await sandbox.start(f"{OWNER}/containment")
        try:
            return [await _network(session, config), await _processes(session, config), await _files(session, config)]
        finally:
            await session.close()
    finally:
        await sandbox.close()


async def _network(session: Session, config: RunConfig) -> Check:
    with _listeners(config) as listeners:
        addresses = [listener.getsockname()[:2] for listener in listeners]
        output = await _run(session, _CONNECT.format(addresses=[*addresses, *_servers(config), OUTSIDE]))
        visited = []
        for listener in listeners:
            with contextlib.suppress(BlockingIOError):
                listener.accept()[0].close()
                visited.append(str(listener.getsockname()[:2]))
    reached = [line.removeprefix("REACHED ") for line in output.splitlines() if line.startswith("REACHED")] + visited
    return _judged("network", reached, output, "code in a box reaches nothing")


async def _processes(session: Session, config: RunConfig) -> Check:
    output = await _run(session, _FORK.format(tries=config.sandbox.pids + 64))
    beyond = [f"{config.sandbox.pids + 64} processes where sandbox.pids is {config.sandbox.pids}"]
    answers = (await session.run_python("print(6 * 7)")).stdout.strip() == "42"
    if not answers:
        return Check("containment: processes", False, "the box does not answer after a burst of processes", BACKEND)
    return _judged("processes", beyond if "UNLIMITED" in output else [], output, f"at most {config.sandbox.pids}")


async def _files(session: Session, config: RunConfig) -> Check:
    with _secret() as secret:
        output = await _run(session, _READ.format(paths=[str(secret), os.path.join(config.model, "config.json")]))
    read = [output.removeprefix("READ ")] if output.startswith("READ") else []
    return _judged("host files", read, output, "neither files nor secrets of this machine")


@contextlib.contextmanager
def _secret() -> Iterator[Path]:
    """A file as open as it can be: the box's walls alone are in the way."""
    with tempfile.TemporaryDirectory(prefix="penstock-doctor-") as folder:
        Path(folder).chmod(0o755)
        secret = Path(folder) / "secret"
        secret.write_text("of the host")
        secret.chmod(0o644)
        yield secret


async def _run(session: Session, code: str) -> str:
    """Return the attack's output. A box that ended it by a limit has held: its kind is printed instead."""
    result = await session.run_python(code, timeout_s=30.0)
    if NO_PYTHON in result.stderr and not result.stdout:
        raise SandboxError(result.stderr.strip())
    return result.stdout.strip() or (f"walled {result.limit}" if result.limit else result.stderr.strip()[-300:])


def _judged(attack: str, reached: list[str], output: str, guarantee: str) -> Check:
    name = f"containment: {attack}"
    if reached:
        return Check(name, False, f"code in a box reached {', '.join(reached)}", BACKEND)
    if "walled" not in output:
        return Check(name, False, f"the attack could not be tried: {output or 'it said nothing'}", BACKEND)
    return Check(name, True, guarantee)


@contextlib.contextmanager
def _listeners(config: RunConfig) -> Iterator[list[socket.socket]]:
    """Listen on loopback and on the address that leads out of this machine: boxes elsewhere could only reach that
    one.
    """
    with contextlib.ExitStack() as stack:
        listeners = []
        for host in dict.fromkeys(("127.0.0.1", _outward(config))):
            listener = stack.enter_context(socket.create_server((host, 0)))
            listener.setblocking(False)
            listeners.append(listener)
        yield listeners


def _outward(config: RunConfig) -> str:
    """Our address as the sandbox server, or the internet, would see it; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_servers(config) or [OUTSIDE])[0])
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _servers(config: RunConfig) -> list[tuple[str, int]]:
    """The sandbox server itself must not be within reach of its boxes."""
    url = urlsplit(config.sandbox.url or "") if config.sandbox.backend == "remote" else None
    return [(url.hostname, url.port or 80)] if url and url.hostname else []
