"""Output as it comes, over HTTP and without."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from penstock.sandbox import Output, RemoteSandbox, RunResult, SandboxConfig, SandboxLost, Session, make_sandbox

pytestmark = pytest.mark.bwrap
SLOWLY = "echo one; sleep 0.7; echo two > done"


@pytest_asyncio.fixture(params=["bwrap", "unsafe_subprocess", "remote"])
async def session(request: pytest.FixtureRequest, remote: RemoteSandbox) -> AsyncIterator[Session]:
    if request.param == "remote":
        yield await remote.start("streams")
        return
    sandbox = make_sandbox(SandboxConfig(backend=request.param, max_boxes=2), "tests-streams")
    yield await sandbox.start("streams")
    await sandbox.close()


async def test_pieces_come_while_the_run_goes_on_and_the_result_last(session: Session) -> None:
    stream = session.stream(["sh", "-c", "echo one; read line; sleep 60"], stdin="x" * 200_000, timeout_s=2.0)
    assert await anext(stream) == Output("stdout", "one\n")  # of a run that does not end by itself
    last = [piece async for piece in stream]
    assert [(piece.data, piece.result.limit) for piece in last if piece.result] == [("", "wall")]
    assert last[-1].result is not None


async def test_texts_are_whole_characters_and_end_as_run_would(session: Session) -> None:
    script = r"printf 'h\303'; sleep 0.2; printf '\251 \377'; echo err >&2; exit 3"
    pieces = [piece async for piece in session.stream(["sh", "-c", script], stdin="", cwd="/usr", timeout_s=10.0)]
    assert "".join(piece.data for piece in pieces if piece.stream == "stdout") == "hé \ufffd"
    assert "".join(piece.data for piece in pieces if piece.stream == "stderr") == "err\n"
    results = [piece.result for piece in pieces if piece.result is not None]
    assert [pieces[-1].result] == results
    assert results[0] is not None
    assert (results[0].stdout, results[0].stderr, results[0].exit_code) == ("hé \ufffd", "err\n", 3)


async def test_a_limit_is_told_in_the_result_and_the_pieces_are_bounded(session: Session) -> None:
    seen = 0
    result: RunResult | None = None
    async for piece in session.stream(["sh", "-c", "yes; sleep 60"], timeout_s=10.0):
        seen, result = seen + len(piece.data), piece.result
    assert result is not None
    assert (result.exit_code, result.limit) == (None, "output")
    assert seen == 65536
    stopped = [piece async for piece in session.stream(["sleep", "60"], timeout_s=0.2)]
    assert [piece.result.limit for piece in stopped if piece.result] == ["wall"]
    assert (await session.run_python("1")).stdout == "1\n"


async def test_a_reader_that_leaves_stops_no_run_of_a_server(remote: RemoteSandbox) -> None:
    session = await remote.start("leaver")
    await session.run_python("x = 5")
    stream = session.stream(["sh", "-c", SLOWLY], timeout_s=10.0)
    assert (await anext(stream)).data == "one\n"
    await stream.aclose()  # type: ignore[attr-defined]
    other = await remote.attach(session.session_id)
    assert (await other.run_python("x")).stdout == "5\n"  # it waited for its turn
    assert await other.read_file("done") == b"two\n"


async def test_a_reader_that_leaves_a_box_of_its_own_ends_the_run() -> None:
    sandbox = make_sandbox(SandboxConfig(max_boxes=1), "tests-streams")
    session = await sandbox.start("leaver")
    stream = session.stream(["sh", "-c", SLOWLY], timeout_s=10.0)
    assert (await anext(stream)).data == "one\n"
    await stream.aclose()  # type: ignore[attr-defined]
    after = await session.run(["ls"])
    assert (after.stdout, after.files_lost) == ("", True)
    await sandbox.close()


async def test_refusals_come_before_the_first_line(remote: RemoteSandbox, client: httpx.AsyncClient) -> None:
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
