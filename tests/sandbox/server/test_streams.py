"""Output as it comes, over HTTP and without."""

from __future__ import annotations

import httpx
import pytest

from penstock.sandbox import RemoteSandbox, SandboxConfig, SandboxLost, make_sandbox

pytestmark = pytest.mark.bwrap
SLOWLY = "echo one; sleep 0.7; echo two > done"


async def test_stream_reader_that_leaves_stops_no_run(remote: RemoteSandbox) -> None:
    session = await remote.start("leaver")
    await session.run_python("x = 5")
    stream = session.stream(["sh", "-c", SLOWLY], timeout_s=10.0)
    assert (await anext(stream)).data == "one\n"
    await stream.aclose()  # type: ignore[attr-defined]
    other = await remote.attach(session.session_id)
    assert (await other.run_python("x")).stdout == "5\n"  # it waited for its turn
    assert await other.read_file("done") == b"two\n"


async def test_stream_reader_that_leaves_ends_its_own_box() -> None:
    sandbox = make_sandbox(SandboxConfig(max_boxes=1), "tests-streams")
    session = await sandbox.start("leaver")
    stream = session.stream(["sh", "-c", SLOWLY], timeout_s=10.0)
    assert (await anext(stream)).data == "one\n"
    await stream.aclose()  # type: ignore[attr-defined]
    after = await session.run(["ls"])
    assert (after.stdout, after.files_lost) == ("", True)
    await sandbox.close()


async def test_stream_refusals_come_before_the_first_line(remote: RemoteSandbox, client: httpx.AsyncClient) -> None:
    session = await remote.start("refusals")
    path = f"/sessions/{session.session_id}/stream"
    assert (await client.post(path, json={"argv": []})).status_code == 422
    assert (await client.post("/sessions/none/stream", json={"argv": ["true"]})).status_code == 404
    answer = await client.post(path, json={"argv": ["echo", "a"]})
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = answer.text.splitlines()
    assert lines[0] == '{"stream":"stdout","data":"a\\n"}'
    assert lines[1].startswith('{"result":{"stdout":"a\\n","stderr":"","exit_code":0,')
    await session.close()
    with pytest.raises(SandboxLost):
        [piece async for piece in session.stream(["true"])]
