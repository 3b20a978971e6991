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
import math
import os
import random
import re
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

MAX_NUMBERS = 32
MAX_ERROR = 4000
GYMNASIUM_ID = re.compile(r"(?:[\w./-]+)-v\d+")
Json = dict[str, Any]


class Invalid(Exception):
    """The action is none of the environment's."""


# finding the environment ----------------------------------------------------------------------------------------------
def factory_of(name: str) -> Callable[..., Any]:
    """``textarena:ID``, ``gymnasium:ID``, ``ID-v0``, ``package:ID-v0``, ``module:factory`` or ``/file.py:factory``."""
    module_name, _, attribute = name.rpartition(":")
    if not module_name:
        return _made_by("gymnasium", name)
    if module_name in ("gymnasium", "gym", "textarena"):
        return _made_by(module_name, attribute)
    module = _file(module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
    found: Any = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if found is None and GYMNASIUM_ID.fullmatch(attribute):
        return _made_by("gymnasium", attribute)
    if not callable(found):
        raise AttributeError(f"{module_name} has no function or class {attribute!r}")
    made: Callable[..., Any] = found
    return made


def _made_by(package: str, name: str) -> Callable[..., Any]:
    make = importlib.import_module(package).make
    return lambda **options: make(name, **options)


def _file(path: str) -> Any:
    sys.path.append(os.path.dirname(path))
    spec = importlib.util.spec_from_file_location("penstock_environment", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# environments in one shape --------------------------------------------------------------------------------------------
class Stepped:
    """One environment of Gymnasium's shape, old or new, or of TextWorld's: what `step` returns tells which."""

    def __init__(self, env: Any, settings: Json) -> None:
        self.env = env
        self._settings = settings
        self._total = 0.0

    def reset(self, seed: int) -> Json:
        returned = self._first(seed)
        pair = isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)
        observation, info = returned if pair else (returned, _as_info(returned))
        return self._told(observation, info)

    def _first(self, seed: int) -> Any:
        parameters = inspect.signature(self.env.reset).parameters
        if "seed" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
            return self.env.reset(seed=seed)
        if callable(getattr(self.env, "seed", None)):
            self.env.seed(seed)
        return self.env.reset()

    def step(self, action: str) -> Json:
        returned = self.env.step(self._action(action))
        if not isinstance(returned, tuple) or not 3 <= len(returned) <= 5:
            raise TypeError(f"step() returned {returned!r:.200}; expected (observation, reward, …, done, info)")
        observation, reward, *ends = returned
        info = ends.pop() if isinstance(ends[-1], Mapping) else _as_info(observation)
        terminated, truncated = bool(ends[0]), len(ends) > 1 and bool(ends[1])
        # Gymnasium's own mark in the old shape of four: the end is its limit of steps.
        if len(ends) == 1 and (info.get("TimeLimit.truncated") or info.get("truncated")):
            terminated, truncated = False, True
        return self._told(observation, info, self._reward(reward), terminated, truncated)

    def close(self) -> None:
        if callable(getattr(self.env, "close", None)):
            self.env.close()

    def _action(self, action: str) -> Any:
        """A number where the environment's actions are numbered: by its name, where the settings name them."""
        space = getattr(self.env, "action_space", None)
        first, count = int(getattr(space, "start", 0)), getattr(space, "n", None)
        if not hasattr(count, "__index__"):
            return action
        names = self._settings.get("actions")
        if names:
            return first + list(names).index(action)
        if not re.fullmatch(r"-?\d{1,9}", action) or not first <= int(action) < first + int(count):
            raise Invalid(f"an action is a number from {first} to {first + int(count) - 1}")
        return int(action)

    def _reward(self, given: Any) -> float:
        reward = float(given or 0.0)
        if self._settings.get("rewards") != "total":
            return reward
        before, self._total = self._total, reward
        return reward - before

    def _told(
        self, observation: Any, info: Mapping[str, Any], reward: float = 0.0, terminated: bool = False, truncated: bool = False
    ) -> Json:
        text = self._text(observation)
        return {
            "text": text[: self._settings["max_observation_chars"]],
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
            "state": self._state(text, info),
            "numbers": dict(list(_numbers(info))[:MAX_NUMBERS]),
            "shown": {name: plain(_found(name, info, observation)) for name in self._settings.get("show", ())},
        }

    def _text(self, observation: Any) -> str:
        if self._settings.get("observe") == "render":
            rendered = self.env.render()
            if not isinstance(rendered, str):
                raise TypeError(f"render() returned {type(rendered).__name__}, not text: make it with render_mode 'ansi'")
            return rendered
        return text_of(observation)

    def _state(self, text: str, info: Mapping[str, Any]) -> str:
        name = self._settings.get("state", "")
        if not name:
            return text
        if name in info:
            return json.dumps(plain(info[name]), sort_keys=True, default=repr)
        found = getattr(getattr(self.env, "unwrapped", self.env), name, None)
        found = getattr(self.env, name, None) if found is None else found
        if found is None:
            raise AttributeError(f"the environment has no {name!r}, nor its info: setting state")
        return json.dumps(plain(found() if callable(found) else found), sort_keys=True, default=repr)


class TextArena(Stepped):
    """One of TextArena's for a single player: observations are fetched, and tell the whole game so far."""

    _heard = ""

    def reset(self, seed: int) -> Json:
        self.env.reset(num_players=1, seed=seed)
        return self._told(self._news(), {})

    def step(self, action: str) -> Json:
        done, info = self.env.step(action)
        facts = dict(info or {})
        if not done:
            return self._told(self._news(), facts)
        rewards, games = self.env.close()
        mine = (games or {}).get(0) or {}
        return self._told(str(mine.get("reason") or ""), {**facts, **mine}, float((rewards or {}).get(0, 0.0)), True)

    def close(self) -> None:
        """`step` has closed a game that ended; another one has nothing open."""

    def _news(self) -> str:
        """What the observation has more than the last one: most wrappers repeat the whole game in each."""
        _, whole = self.env.get_observation()
        text = text_of(whole)
        before, self._heard = self._heard, text
        return text.removeprefix(before).strip("\n")


def text_of(observation: Any) -> str:
    """An observation as text; numbers, arrays and mappings as JSON."""
    if isinstance(observation, str):
        return observation
    for name in ("text", "observation", "feedback"):
        given = observation.get(name) if isinstance(observation, Mapping) else getattr(observation, name, None)
        if isinstance(given, str):
            return given
    if isinstance(observation, list | tuple) and observation and isinstance(observation[0], tuple):
        return "\n".join(str(part[1]) for part in observation)  # TextArena's (from, message, kind)
    return json.dumps(plain(observation), default=repr, ensure_ascii=False)


def plain(value: Any) -> Any:
    """Arrays as lists, sets sorted, numpy's numbers as Python's."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(plain, value), key=repr)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _as_info(observation: Any) -> Mapping[str, Any]:
    """TextWorld's states are both."""
    return observation if isinstance(observation, Mapping) else {}


def _found(name: str, info: Mapping[str, Any], observation: Any) -> Any:
    return info[name] if name in info else getattr(observation, name, None)


def _numbers(info: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in info.items():
        value = plain(value)
        if isinstance(value, bool | int | float) and math.isfinite(value):
            yield str(name), float(value)


# the process of an episode --------------------------------------------------------------------------------------------
class Lines:
    """Lines of JSON over a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._read = b""

    def send(self, message: Json) -> None:
        self.connection.sendall(json.dumps(message, default=repr).encode() + b"\n")

    def receive(self) -> Json | None:
        """The next line; None at the end of file."""
        while b"\n" not in self._read:
            if not self.fill():
                return None
        line, _, self._read = self._read.partition(b"\n")
        asked: Json = json.loads(line)
        return asked

    def fill(self) -> bool:
        """Reads once. False at the end of file."""
        more = self.connection.recv(1 << 16)
        self._read += more
        return bool(more)

    @property
    def waiting(self) -> bool:
        """Whether `receive` has a line without reading."""
        return b"\n" in self._read


def serve(lines: Lines, make: Callable[..., Any]) -> None:
    """One episode, to the end of its connection."""
    episode: Stepped | None = None
    while (asked := lines.receive()) is not None:
        try:
            if asked["op"] == "close":
                if episode is not None:
                    episode.close()
                return
            if asked["op"] == "reset":
                _seed(asked["seed"])
                episode = _wrapped(make(**asked["options"], **_seed_for(make, asked)), asked["settings"])
                lines.send(episode.reset(asked["seed"]))
            elif episode is not None:
                lines.send(episode.step(asked["action"]))
        except Invalid as error:
            lines.send({"invalid": str(error)})
        except (Exception, SystemExit) as error:  # noqa: BLE001 - an episode's failure is the worker's to type
            lines.send({"error": describe(error)})


def _wrapped(env: Any, settings: Json) -> Stepped:
    theirs = callable(getattr(env, "get_observation", None)) and hasattr(env, "step")
    return (TextArena if theirs else Stepped)(env, settings)


def _seed_for(make: Callable[..., Any], asked: Json) -> Json:
    """For a factory that makes the environment from its seed: one with a parameter of that name."""
    try:
        takes = "seed" in inspect.signature(make).parameters
    except ValueError:
        return {}
    return {"seed": asked["seed"]} if takes and "seed" not in asked["options"] else {}


def _seed(seed: int) -> None:
    """The generators that an environment may take without asking for a seed."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % (1 << 32))


def describe(error: BaseException) -> str:
    """``ValueError: text (env.py, line 12)``"""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}"[:MAX_ERROR] + where


# the host -------------------------------------------------------------------------------------------------------------
def connect(address: Any) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect("\0" + address["unix"])
    return connection


class Host:
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
        finally:
            for episode in list(self._pids):
                self._kill(episode)

    def _import(self) -> Callable[..., Any] | None:
        asked = self._control.receive()
        if asked is None:
            return None
        sys.path[:0] = asked["path"]
        try:
            make = factory_of(asked["env"])
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
                self._report_ended()
            if self._control.connection in ready and not self._control.fill():
                return
            while self._control.waiting:
                self._obey(self._control.receive() or {}, make, woken)

    def _obey(self, asked: Json, make: Callable[..., Any], woken: socket.socket) -> None:
        if "fork" in asked:
            self._fork(asked["fork"], make, woken)
        else:
            self._kill(asked["end"])

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
            self._control.connection.close()
            woken.close()
            lines = Lines(connect(self._address))
            lines.send({"episode": episode, "pid": os.getpid()})
            serve(lines, make)
            status = 0
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

    def _report_ended(self) -> None:
        for episode, pid in list(self._pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._pids[episode]
                self._control.send({"ended": episode, "status": status})


def tree_of(root: int) -> Sequence[int]:
    """`root` and the processes below it, parents first."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent dies."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    faulthandler.enable()
    os.dup2(2, 1)  # what an environment prints goes where its errors go
    Host(json.loads(sys.argv[1])).run()
