"""SandboxFusion's ``/run_code``, field for field."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import pytest
from tests.sandbox.server.conftest import Start, headers

from penstock.sandbox import SandboxConfig, make_sandbox
from penstock.sandbox.config import SandboxServerConfig
from penstock.sandbox.server import build_app
from penstock.testing import FakeSandbox

pytestmark = pytest.mark.bwrap


async def ask(client: httpx.AsyncClient, code: str, language: str = "python", **more: Any) -> dict[str, Any]:
    answer = await client.post("/run_code", json={"code": code, "language": language, **more})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def test_run_code_success_has_exactly_their_shape(client: httpx.AsyncClient) -> None:
    body = await ask(client, "print(input())", stdin="hi")
    assert body["run_result"].pop("execution_time") > 0
    assert body == {
        "status": "Success",
        "message": "",
        "compile_result": None,
        "run_result": {"status": "Finished", "return_code": 0, "stdout": "hi\n", "stderr": ""},
        "executor_pod_name": None,
        "files": {},
    }
    assert (await client.get("/health")).json()["sessions"] == 0


async def test_run_code_what_the_code_did_wrong_is_failed(client: httpx.AsyncClient) -> None:
    raised = await ask(client, "import sys; print('x'); sys.exit(3)")
    assert (raised["status"], raised["run_result"]["return_code"], raised["run_result"]["stdout"]) == (
        "Failed",
        3,
        "x\n",
    )
    assert "SyntaxError" in (await ask(client, "1 +"))["run_result"]["stderr"]
    slow = await ask(client, "import time\nprint('before', flush=True)\ntime.sleep(60)", run_timeout=10.0)
    assert (slow["status"], slow["message"]) == ("Failed", "")
    assert (slow["run_result"]["status"], slow["run_result"]["return_code"]) == ("TimeLimitExceeded", None)
    assert slow["run_result"]["stdout"] == "before\n"
    large = await ask(client, "x = b'x' * (1 << 30)")
    assert (large["status"], large["run_result"]["status"]) == ("Failed", "Finished")
    limited = await ask(client, "x = bytes(100 << 20)", memory_limit_MB=64)
    assert limited["run_result"]["stderr"].endswith("MemoryError\n")
    assert (await ask(client, "x = bytes(1 << 20)", memory_limit_MB=1024))["status"] == "Success"


async def test_run_code_bash_files_in_and_files_out(client: httpx.AsyncClient) -> None:
    files = {"data/in.txt": base64.b64encode(b"a\nb\n").decode(), "skipped": None}
    body = await ask(
        client,
        "wc -l < data/in.txt; printf '\\377' > out.bin; ls",
        "bash",
        files=files,
        fetch_files=["out.bin", "data/in.txt", "nothing"],
    )
    assert body["run_result"]["stdout"] == "2\ndata\nmain.sh\nout.bin\n"
    assert body["files"] == {"out.bin": "/w==", "data/in.txt": "YQpiCg=="}


async def test_run_code_bounds_fetched_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small request must not make the server hold, and answer with, gigabytes."""
    monkeypatch.setattr("penstock.sandbox.server.run_code.MAX_FILE_BYTES", 5000)
    config = SandboxConfig(max_boxes=1, backend="unsafe_subprocess")
    sandbox = make_sandbox(config, "tests-run-code")
    app = build_app(sandbox, config, "t")
    write = "open('f', 'w').write('x' * 1000)"
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://x", headers=headers("t")
    ) as client:
        names = [f"{'./' * number}f" for number in range(6)]
        body = await ask(client, write, fetch_files=names[:5])
        assert list(body["files"]) == names[:5]
        refused = await client.post("/run_code", json={"code": write, "language": "python", "fetch_files": names})
        assert (refused.status_code, refused.json()["error"]["field"]) == (422, "body.fetch_files")
        assert (await client.get("/health")).json()["sessions"] == 0
    await sandbox.close()


async def test_run_code_what_is_not_run_here_is_refused_with_reason(client: httpx.AsyncClient) -> None:
    for body, field in (
        ({"code": "int main() {}", "language": "cpp"}, "body.language"),
        ({"code": "1", "language": "python", "args": ["-x"]}, "body.args"),
        ({"code": "1", "language": "python", "files": {"f": "no base64!"}}, "body.files"),
        ({"code": "1", "language": "python", "files": {"/etc/x": ""}}, "body.files"),
        ({"code": "1"}, "body.language"),
        ({"code": "1", "language": "python", "more": 1}, "body.more"),
        ({"code": "1", "language": "python", "run_timeout": "5"}, "body.run_timeout"),
    ):
        answer = await client.post("/run_code", json=body)
        assert (answer.status_code, answer.json()["error"]["field"]) == (422, field), answer.text
    told = (await client.post("/run_code", json={"code": "", "language": "cpp"})).json()["error"]["message"]
    assert "languages here are python and bash, not 'cpp'" in told


async def test_run_code_reports_a_sandbox_failure_apart() -> None:
    fake = FakeSandbox()
    fake.failures = 1
    config = SandboxConfig(max_boxes=1)
    app = build_app(fake, config, "t")
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers("t")) as client:
        body = await ask(client, "1")
        assert (body["status"], body["message"], body["run_result"]) == ("SandboxError", "no box today", None)
        assert (await client.get("/health")).json()["sessions"] == 0


async def test_run_code_full_server_refuses_instead_of_failing_code(start: Start) -> None:
    server = SandboxServerConfig(queue_timeout_s=0.2)
    url = await start(SandboxConfig(max_boxes=1, backend="unsafe_subprocess", server=server))
    async with httpx.AsyncClient(base_url=url, headers=headers(), timeout=60) as client:
        assert (await client.post("/sessions", json={})).status_code == 200
        refused = await client.post("/run_code", json={"code": "1", "language": "python"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
