"""Rights per role, checked by a real redis-server: what each may do and what it is refused, in and out of scripts."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable

import pytest
import pytest_asyncio
from redis_parts import PASSWORD, small_scripts  # noqa: F401 - a fixture

from penstock.transfer_queue import QueueError, QueueUnavailable, RedisServer
from penstock.transfer_queue.redis import RIGHTS, ROLES, Connection, role_users, setuser_commands
from penstock.transfer_queue.redis.keys import Keys
from penstock.transfer_queue.redis.scripts import library

pytestmark = [pytest.mark.redis, pytest.mark.asyncio(loop_scope="module")]
RUN, OTHER = Keys("mine"), Keys("other")
PAYLOAD = RUN.payload("train/0#0@1")
PASSWORDS = {role: f"{role}-password" for role in RIGHTS}
Users = dict[str, Connection]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def users(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Users]:
    """Role → its connection; ``default``: it may do everything; ``hasty``: an agent's that waits for nothing."""
    lines = role_users("mine", PASSWORDS)
    async with RedisServer(tmp_path_factory.mktemp("redis"), PASSWORD, users=lines) as server:
        made = {"default": await Connection.connect(server.url, deadline_s=120, password=PASSWORD)}
        for role, password in PASSWORDS.items():
            made[role] = await Connection.connect(server.url, deadline_s=120, password=password, username=role)
        made["hasty"] = await Connection.connect(
            server.url, deadline_s=120, password=PASSWORDS["agent"], username="agent"
        )
        made["hasty"]._deadline_s = 2.0
        yield made
        for connection in made.values():
            await connection.close()


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def a_run(users: Users, small_scripts: None) -> None:
    await users["default"].command("FLUSHALL")
    hashes = ("run", "steps", "group:train/0", "servers", "waits")
    await users["default"].script("echo", RUN.index)  # loads the functions
    await users["default"].many(
        [
            *(("HSET", RUN.index + name, "field", "value") for name in hashes),
            ("SET", PAYLOAD, b"packed"),
            ("HSET", OTHER.run, "field", "value"),
            ("SET", OTHER.payload("train/0#0@1"), b"packed"),
        ]
    )


MAY_WRITE = {
    "owner": {"run", "steps", "group:train/0", "servers", "waits"},
    "trainer": {"steps", "group:train/0", "servers", "waits"},
    "agent": {"group:train/0", "waits"},
    "rollout": {"group:train/0", "servers", "waits"},
    "watch": set(),
}


@pytest.mark.parametrize("name", sorted(MAY_WRITE["owner"]))
@pytest.mark.parametrize("role", RIGHTS)
async def test_index_keys(users: Users, role: str, name: str) -> None:
    user, key = users[role], RUN.index + name
    for read in (user.command("HGET", key, "field"), user.script("read_field", RUN.index, key)):
        assert await allowed(read)
    for write in (user.command("HSET", key, "field", "new"), user.script("write_field", RUN.index, key)):
        assert await allowed(write) == (name in MAY_WRITE[role])
    kept = await users["default"].command("HGET", key, "field")
    assert kept == (b"new" if name in MAY_WRITE[role] else b"value")


@pytest.mark.parametrize("role", RIGHTS)
async def test_payloads(users: Users, role: str) -> None:
    writes = role != "watch"
    assert await allowed(users[role].command("GET", PAYLOAD))
    assert await allowed(users[role].command("SET", PAYLOAD, b"other")) == writes
    assert await allowed(users[role].command("UNLINK", PAYLOAD)) == writes
    assert await users["default"].command("EXISTS", PAYLOAD) == (0 if writes else 1)


@pytest.mark.parametrize("role", ["agent", "rollout", "watch"])
async def test_only_the_trainer_commits(users: Users, role: str) -> None:
    assert not await allowed(users[role].script("commit_and_forget", RUN.index))
    assert await users["default"].command("EXISTS", RUN.index + "group:train/0") == 1
    assert await allowed(users["trainer"].script("commit_and_forget", RUN.index))
    assert await users["default"].command("EXISTS", RUN.index + "group:train/0") == 0


@pytest.mark.parametrize("role", RIGHTS)
async def test_other_runs_are_out_of_reach(users: Users, role: str) -> None:
    user = users[role]
    for call in (
        user.command("HGET", OTHER.run, "field"),
        user.command("HSET", OTHER.run, "field", "new"),
        user.command("GET", OTHER.payload("train/0#0@1")),
        user.script("read_field", RUN.index, OTHER.run),
    ):
        assert not await allowed(call)


@pytest.mark.parametrize("role", RIGHTS)
async def test_nobody_reaches_the_server_itself(users: Users, role: str) -> None:
    for command in ("FLUSHALL", "KEYS *", "CONFIG GET dir", "ACL LIST", "SHUTDOWN", "BGREWRITEAOF", "SCRIPT FLUSH"):
        assert not await allowed(users[role].command(*command.split())), command
    for command in ("MONITOR", "CLIENT LIST", "REPLICAOF NO ONE", "SAVE", "MODULE LIST", "SWAPDB 0 1", "PUBLISH a b"):
        assert not await allowed(users[role].command(*command.split())), command


@pytest.mark.parametrize("role", RIGHTS)
async def test_every_role_has_what_a_connection_needs(users: Users, role: str) -> None:
    assert (await users[role].info())["used_memory"] > 0
    assert await users[role].script("echo", RUN.index, "x") == [[RUN.index.encode()], [b"x"]]
    assert await allowed(users[role].command("SCAN", 0)) == (role in ("owner", "trainer", "watch"))


ENDLESS = "while true do end"


@pytest.mark.parametrize("role", RIGHTS)
async def test_no_role_runs_a_script_of_its_own(users: Users, role: str) -> None:
    """One that never ends stops Redis for everybody, and with it the run."""
    sha = await users["default"].command("SCRIPT", "LOAD", "return 1")
    for command in (
        *(("EVAL", "return 1", 1, RUN.index), ("EVAL_RO", "return 1", 1, RUN.index), ("EVALSHA", sha, 1, RUN.index)),
        *(("SCRIPT", "LOAD", ENDLESS), ("FUNCTION", "DELETE", library().name), ("FUNCTION", "FLUSH")),
        ("FUNCTION", "RESTORE", b""),
    ):
        assert not await allowed(users[role].command(*command)), command
    loads = users[role].command("FUNCTION", "LOAD", "#!lua name=theirs\nredis.register_function('theirs', print)")
    if role == "owner":
        with pytest.raises(QueueError, match="nonexistent global variable 'print'"):
            await loads
    else:
        assert not await allowed(loads)


@pytest.mark.parametrize("role", RIGHTS)
async def test_an_unknown_function_is_refused(users: Users, role: str) -> None:
    with pytest.raises(QueueError, match="Function not found"):
        await users[role].command("FCALL", "nobody_loaded_this", 1, RUN.index)


async def test_a_role_waits_until_the_owner_has_loaded(users: Users) -> None:
    await users["default"].command("FUNCTION", "FLUSH")
    waiting = asyncio.create_task(users["agent"].script("echo", RUN.index))
    stats = users["default"]
    while "errorstat_NOPERM" not in await stats.command("INFO", "errorstats"):
        await asyncio.sleep(0.01)
    assert not waiting.done()
    await users["owner"].script("echo", RUN.index)
    assert await waiting == [[RUN.index.encode()], []]
    await users["default"].command("FUNCTION", "FLUSH")
    with pytest.raises(QueueUnavailable, match=r"only the run's owner may load them: start `penstock run`"):
        await users["hasty"].script("echo", RUN.index)


async def test_passwords_are_kept_as_hashes() -> None:
    lines = role_users("mine", PASSWORDS)
    assert [line.split()[1] for line in lines] == list(RIGHTS)
    for line, password in zip(lines, PASSWORDS.values(), strict=True):
        assert password not in line
        assert f"#{hashlib.sha256(password.encode()).hexdigest()}" in line.split()
    assert set(ROLES) == set(RIGHTS) - {"owner"}


async def test_the_commands_for_ones_own_redis_work(users: Users) -> None:
    for line in setuser_commands("theirs", {"agent": "another-password"}):
        assert await users["default"].command(*line.split())
    found = await users["default"].command("ACL", "GETUSER", "theirs-agent")
    assert "~penstock:payload:theirs:*" in str(found)


@pytest.mark.parametrize(
    ("run", "passwords", "problem"),
    [
        ("mine", {"root": "long-enough"}, "role 'root': there are owner, trainer"),
        ("mine", {"agent": "short"}, "password of agent: at least 8"),
        ("mine", {"agent": "1234567"}, "password of agent: at least 8"),
        ("mine*", {"agent": "long-enough"}, "run name"),
        ("mine ~*", {"agent": "long-enough"}, "run name"),
    ],
)
async def test_what_could_reach_too_far_is_refused(run: str, passwords: dict[str, str], problem: str) -> None:
    assert len(role_users("mine", {"agent": "12345678"})) == 1
    with pytest.raises(QueueError, match=problem):
        role_users(run, passwords)


async def allowed(call: Awaitable[object]) -> bool:
    """False where Redis refused it for want of rights; any other refusal is raised."""
    try:
        await call
    except QueueError as error:
        if "Rights per role" not in str(error):
            raise
        return False
    return True
