"""The host of one kind of environment: imports it once, and forks a process per episode. Standard library only.

    python host.py ADDRESS

    worker ◄──control──► host ──fork──► process of an episode ◄──its own connection──► worker

Both connect to ADDRESS (JSON: a unix socket's name) and speak lines of JSON. Control, worker to host:

    {"env": "package.module:factory", "path": [folder, …]}     first; answered {"ready": true} or {"error": …}
    {"fork": 3}          the process connects and says {"episode": 3, "pid": …}
    {"end": 3}           it is killed, with whatever it started

and host to worker ``{"ended": 3, "status": waitstatus}``. An episode's connection:

    {"op": "reset", "options": {…}, "seed": 7, "settings": {…}}
    {"op": "step", "action": "left"}
    {"op": "close"}

answered ``{"text", "reward", "terminated", "truncated", "state", "numbers", "shown"}``, ``{"invalid": reason}`` for an
action that the environment's action space does not have, or ``{"error": …}``. End of file ends either process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import inspect
import json
import os
import random
import re
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

MAX_ERROR = 4000
MAX_LINE_BYTES = 16 << 20
"""Longest message to the worker, which closes the connection of a longer one (`gymnasium.MAX_LINE_BYTES`)."""
Json = dict[str, Any]


def _loaded(name: str, path: str) -> Any:
    """The module in a file, under a name that no package has."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


shapes = _loaded("penstock_shapes", os.path.join(os.path.dirname(os.path.abspath(__file__)), "shapes.py"))


# finding the environment ----------------------------------------------------------------------------------------------
def factory_of(name: str) -> Callable[..., Any]:
    """``textarena:ID``, ``gymnasium:ID``, ``ID-v0``, ``package:ID-v0``, ``module:factory`` or ``/file.py:factory``."""
    module_name, _, attribute = name.rpartition(":")
    if not module_name:
        return _made_by("gymnasium", name)
    if module_name in ("gymnasium", "gym", "textarena"):
        return _made_by(module_name, attribute)
    module = _file(module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
    value: Any = module
    for part in attribute.split("."):
        value = getattr(value, part, None)
    if value is None and re.fullmatch(r"(?:[\w./-]+)-v\d+", attribute):
        return _made_by("gymnasium", attribute)
    if not callable(value):
        raise AttributeError(f"{module_name} has no function or class {attribute!r}")
    factory: Callable[..., Any] = value
    return factory


def _made_by(package: str, name: str) -> Callable[..., Any]:
    make = importlib.import_module(package).make
    return lambda **options: make(name, **options)


def _file(path: str) -> Any:
    sys.path.append(os.path.dirname(path))
    return _loaded("penstock_environment", path)


# the process of an episode --------------------------------------------------------------------------------------------
class Lines:
    """Lines of JSON over a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._read = b""

    def send(self, message: Json) -> None:
        line = json.dumps(message, default=repr).encode()
        if len(line) >= MAX_LINE_BYTES:
            line = json.dumps({"error": f"an answer of {len(line)} bytes; {MAX_LINE_BYTES - 1} are the most"}).encode()
        self.connection.sendall(line + b"\n")

    def receive(self) -> Json | None:
        """The next line; None at the end of file."""
        while b"\n" not in self._read:
            if not self.fill():
                return None
        line, _, self._read = self._read.partition(b"\n")
        message: Json = json.loads(line)
        return message

    def fill(self) -> bool:
        """Reads once. False at the end of file."""
        more = self.connection.recv(1 << 16)
        self._read += more
        return bool(more)

    @property
    def waiting(self) -> bool:
        """Returns True if `receive` has a complete line and need not read."""
        return b"\n" in self._read


def serve(lines: Lines, make: Callable[..., Any]) -> None:
    """One episode, to the end of its connection."""
    episode: Any = None
    while (request := lines.receive()) is not None:
        try:
            if request["op"] == "close":
                if episode is not None:
                    episode.close()
                lines.send({"closed": True})  # and lives on: what it started is found below it
            elif request["op"] == "reset":
                _seed(request["seed"])
                episode = shapes.wrapped(make(**request["options"], **_seed_for(make, request)), request["settings"])
                lines.send(episode.reset(request["seed"]))
            elif episode is not None:
                lines.send(episode.step(request["action"]))
        except shapes.BadAction as error:
            lines.send({"invalid": str(error)})
        except (Exception, SystemExit) as error:  # noqa: BLE001 - an episode's failure is the worker's to type
            env = getattr(episode, "env", None)
            function = getattr(getattr(env, "unwrapped", env), request["op"], make)
            lines.send({"error": describe(error, function)})


def _seed_for(make: Callable[..., Any], request: Json) -> Json:
    """Return the seed for a factory with a parameter of that name, which makes the environment from it."""
    try:
        takes = "seed" in inspect.signature(make).parameters
    except ValueError:
        return {}
    return {"seed": request["seed"]} if takes and "seed" not in request["options"] else {}


def _seed(seed: int) -> None:
    """The generators that an environment may take without asking for a seed."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % (1 << 32))


def describe(error: BaseException, function: Any = None) -> str:
    """``ValueError: text (env.py, line 12)``. `function`: whose result it is about if no line of theirs raised it."""
    ours = (__file__, shapes.__file__)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in ours]
    code = getattr(inspect.unwrap(function), "__code__", None)
    places = [(code.co_filename, code.co_firstlineno)] if code else []
    places += [(frame.filename, frame.lineno) for frame in frames]
    where = f" ({places[-1][0]}, line {places[-1][1]})" if places else ""
    return f"{type(error).__name__}: {error}"[:MAX_ERROR] + where


# the host -------------------------------------------------------------------------------------------------------------
def connect(address: Any) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect("\0" + address["unix"])
    return connection


class EpisodeForker:
    """Forks; reports the end of what it forked. One thread, so that a fork has no lock that another one holds."""

    def __init__(self, address: Any) -> None:
        self._address = address
        self._control = Lines(connect(address))
        self._pids: dict[int, int] = {}
        """Episode → its process, until its end was reported."""

    def run(self) -> None:
        """To the end of the control connection."""
        self._control.send({"control": True})
        make = self._import()
        if make is None:
            return
        gc.collect()
        gc.freeze()  # what is shared with each fork stays unwritten by its collections
        woken, wakes = socket.socketpair()
        wakes.setblocking(False)
        signal.set_wakeup_fd(wakes.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        try:
            self._loop(make, woken)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the worker is gone
        finally:
            for episode in list(self._pids):
                self._kill(episode)

    def _import(self) -> Callable[..., Any] | None:
        message = self._control.receive()
        if message is None:
            return None
        sys.path[:0] = message["path"]
        try:
            make = factory_of(message["env"])
        except BaseException as error:  # noqa: BLE001 - a module may end its process as it is imported
            self._control.send({"error": describe(error)})
            return None
        self._control.send({"ready": True})
        return make

    def _loop(self, make: Callable[..., Any], woken: socket.socket) -> None:
        while True:
            ready, _, _ = select.select([self._control.connection, woken], [], [])
            if woken in ready:
                woken.recv(4096)
                for episode, pid in list(self._pids.items()):
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        del self._pids[episode]
                        self._control.send({"ended": episode, "status": status})
            if self._control.connection in ready and not self._control.fill():
                return
            while self._control.waiting:
                message = self._control.receive() or {}
                if "fork" in message:
                    self._fork(message["fork"], make, woken)
                else:
                    self._kill(message["end"])

    def _fork(self, episode: int, make: Callable[..., Any], woken: socket.socket) -> None:
        host = os.getpid()
        pid = os.fork()
        if pid:
            self._pids[episode] = pid
            return
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with(host)
            adopt_orphans()
            self._control.connection.close()
            woken.close()
            lines = Lines(connect(self._address))
            lines.send({"episode": episode, "pid": os.getpid()})
            serve(lines, make)
            status = 0
        except ConnectionError:
            pass  # the worker is gone
        except BaseException:  # noqa: BLE001 - never back into the host's loop
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _kill(self, episode: int) -> None:
        pid = self._pids.get(episode)
        if pid is not None:
            for one in tree_of(pid):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(one, signal.SIGKILL)


def tree_of(root: int) -> Sequence[int]:
    """`root` and the processes below it, parents first."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry))
    tree = [root]
    for pid in tree:
        tree += children.get(pid, [])
    return tree


def die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent dies."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Has what this process starts stay below it, however often it forks: `tree_of` then finds a browser's children."""
    import ctypes

    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


if __name__ == "__main__":
    faulthandler.enable()
    os.dup2(2, 1)  # what an environment prints goes where its errors go
    EpisodeForker(json.loads(sys.argv[1])).run()
