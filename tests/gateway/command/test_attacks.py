"""Hostile programs: a box reaches the endpoint of its own episode and nothing else, and cannot hold up the worker."""

from __future__ import annotations

import asyncio
import socket

import pytest
from tests.gateway.command.conftest import BACKENDS

from penstock.testing import FakeClient

pytestmark = pytest.mark.bwrap
FIRST = 'ask([user("Hi")])\n'
REACH = """
import socket
from urllib.parse import urlsplit
OWN = urlsplit(os.environ["OPENAI_BASE_URL"])
def tried(name, what):
    try:
        found = what()
    except (OSError, ValueError) as error:
        print(name, type(error).__name__)
    else:
        print(name, "REACHED", found)
def connect(address):
    with socket.create_connection(address, timeout=2) as made:
        return made.getpeername()
"""


@pytest.mark.parametrize("sandbox", BACKENDS, indirect=True)
async def test_attack_nothing_but_the_own_endpoint_is_reachable(run):
    host = socket.gethostbyname(socket.gethostname())
    with socket.create_server(("0.0.0.0", 0)) as listener:
        port = listener.getsockname()[1]
        addresses = [("127.0.0.1", port), (host, port), ("169.254.169.254", 80), ("8.8.8.8", 53), ("172.17.0.1", 80)]
        code = f"""{FIRST}{REACH}
for address in {addresses!r}:
    tried(address, lambda: connect(address))
tried("name", lambda: socket.getaddrinfo("pypi.org", 443))
open_ports = []
for number in range(1, 65536):
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", number)) == 0 and number != probe.getsockname()[1]:
            open_ports.append(number)
print(open_ports == [OWN.port])
"""
        ended = await run(code)
        assert not _visited(listener)
    *lines, only_own = ended.program["stdout"].splitlines()
    assert (len(lines), only_own) == (6, "True"), ended.program
    assert "REACHED" not in ended.program["stdout"]


def _visited(listener: socket.socket) -> bool:
    listener.setblocking(False)
    try:
        listener.accept()
    except BlockingIOError:
        return False
    return True


async def test_attack_the_endpoint_has_one_episode_and_no_way_to_its_reward_or_end(run):
    code = f"""{FIRST}
from urllib.parse import urlsplit
base, key = os.environ["ANTHROPIC_BASE_URL"], os.environ["OPENAI_API_KEY"]
origin = base[: base.index("/episodes")]
def status(method, url, given=key):
    request = urllib.request.Request(url, b"{{}}" if method == "POST" else None, method=method)
    request.add_header("Authorization", "Bearer " + given)
    try:
        return urllib.request.urlopen(request, timeout=60).status
    except urllib.error.HTTPError as error:
        return error.code
other = origin + "/episodes/MSB0cmFpbi8wMDAwMDAwMQ"
print([status("POST", base + path) for path in ("/reward", "/finish", "/v1/../finish", "/v1/nothing")])
print([status("GET", base), status("GET", base + "/v1/models"), status("GET", base + "/v1/models", "wrong")])
print([status("POST", other + "/v1/chat/completions"), status("GET", other + "/v1/models")])
print([status("POST", origin + "/episodes"), status("GET", origin + "/metrics"), status("GET", origin + "/docs")])
print(status("GET", origin + "/openapi.json"), status("GET", origin + "/"))
"""
    ended = await run(code)
    found = [eval(line.replace(" ", ",") if "[" not in line else line) for line in ended.program["stdout"].splitlines()]
    assert found == [[401, 401, 404, 404], [401, 200, 401], [401, 401], [401, 401, 401], (401, 401)], ended.program
    assert ended.trajectory.num_turns == 1


async def test_attack_the_key_of_one_episode_opens_no_other(run):
    leak = FIRST + 'print(os.environ["OPENAI_API_KEY"])'
    one, two = await asyncio.gather(run(leak), run(leak))
    keys = {one.program["stdout"], two.program["stdout"]}
    assert len(keys) == 2
    foreign = f"""
try:
    post("/chat/completions", {{"model": "policy", "messages": [user("Hi")]}}, key={one.program["stdout"].strip()!r})
except urllib.error.HTTPError as error:
    print(error.code)
{FIRST}
"""
    assert (await run(foreign)).program["stdout"] == "401\n"


HOLD_UPS = {
    "connections": """
held = []
for _ in range(220):
    try: held.append(socket.create_connection((OWN.hostname, OWN.port), timeout=0.2))
    except OSError: break
print(len(held) >= 64)
del held
""",
    "half of a request": """
half = [socket.create_connection((OWN.hostname, OWN.port)) for _ in range(20)]
for one in half: one.sendall(b"POST / HTTP/1.1\\r\\nHost: x\\r\\nContent-Le")
print(True)
""",
    "no HTTP": """
one = socket.create_connection((OWN.hostname, OWN.port))
one.sendall(os.urandom(100_000))
one.settimeout(60)
print(one.recv(12) == b"HTTP/1.1 400")
""",
    "an endless body": """
one = socket.create_connection((OWN.hostname, OWN.port))
path = OWN.path + "/chat/completions"
key = os.environ["OPENAI_API_KEY"]
head = f"POST {path} HTTP/1.1\\r\\nHost: x\\r\\nAuthorization: Bearer {key}\\r\\n"
one.sendall((head + "Transfer-Encoding: chunked\\r\\n\\r\\n").encode())
one.settimeout(60)
sent = 0
try:
    while sent < 200 << 20:
        one.sendall(b"10000\\r\\n" + b" " * 65536 + b"\\r\\n")
        sent += 65536
except OSError:
    pass
print(sent < 100 << 20)
""",
    "a body in tiny pieces": """
path, key = OWN.path + "/chat/completions", os.environ["OPENAI_API_KEY"]
head = f"POST {path} HTTP/1.1\\r\\nHost: x\\r\\nAuthorization: Bearer {key}\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n"
sent = 0
for _ in range(8):
    with socket.create_connection((OWN.hostname, OWN.port)) as one:
        one.settimeout(60)
        one.sendall(head.encode())
        try:
            for _ in range(256):
                one.sendall(b"1\\r\\n \\r\\n" * 10_000)
                sent += 1
        except OSError:
            pass
print(sent < 8 * 256)
""",
    "answers that nobody reads": """
path, key = OWN.path + "/models", os.environ["OPENAI_API_KEY"]
deaf = [socket.socket() for _ in range(4)]
for one in deaf:
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.connect((OWN.hostname, OWN.port))
many = f"GET {path} HTTP/1.1\\r\\nHost: x\\r\\nAuthorization: Bearer {key}\\r\\n\\r\\n" * 100
for one in deaf:
    one.settimeout(1)
    try:
        while True:
            one.sendall(many.encode())
    except OSError:
        pass
print(True)
for one in deaf: one.close()
""",
}  # fmt: skip


@pytest.mark.parametrize("name", HOLD_UPS)
async def test_attack_the_worker_is_not_held_up(run, calling_policy, name):
    """The attacker's own endpoint answers afterwards, and another episode beside it all the time."""
    beside = "for n in range(3): ask([user(f'part {n}')])"
    attack = FIRST + REACH + HOLD_UPS[name] + "ask([user('still there?')])"
    client = FakeClient(calling_policy(turns=0))
    hostile, quiet = await asyncio.gather(
        run(attack, client=client, settings={"max_requests": 1_000_000}), run(beside, client=client)
    )
    assert (quiet.outcome.kind, quiet.trajectory.num_turns) == ("completed", 3)
    assert hostile.program["stdout"] == "True\n", hostile.program
    assert (hostile.outcome.kind, hostile.trajectory.num_turns) == ("completed", 2)


async def test_attack_after_its_end_a_program_asks_nothing_more(run, calling_policy):
    """What it left running meets a port that nothing serves, and goes with the box."""
    code = f"""{FIRST}
if os.fork() == 0:
    while True:
        try: ask([user(str(time.time()))])
        except OSError: pass
"""
    client = FakeClient(calling_policy(turns=0))
    ended = await run(code, client=client)
    asked = len(client.requests)
    await asyncio.sleep(0.5)
    assert len(client.requests) == asked
    assert ended.trajectory.num_turns <= asked
