from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

pytest.importorskip("tantivy")
COMMAND = [sys.executable, "-m", "penstock.deploy.cli", "search-server"]


def environment(token: str) -> dict[str, str]:
    return {**os.environ, "PENSTOCK_SEARCH_TOKEN": token}


def test_search_server_indexes_serves_and_ends_on_sigterm(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"id": "1", "title": "Paris", "text": "Capital of France."}))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([*COMMAND, "--corpus", str(corpus), "--port", str(port)], env=environment("s3cret"))
    try:
        answer = ask_when_up(port, process)
        assert [found["id"] for found in answer["result"][0]] == ["1"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) in (0, 143)
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / "corpus.jsonl.index" / "penstock.json").is_file()


def ask_when_up(port: int, process: subprocess.Popen[bytes]) -> dict[str, list[list[dict[str, str]]]]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            answer = httpx.post(
                f"http://127.0.0.1:{port}/retrieve",
                json={"queries": ["france"]},
                headers={"Authorization": "Bearer s3cret"},
            )
            return dict(answer.raise_for_status().json())
        except httpx.ConnectError:
            time.sleep(0.1)
    pytest.fail(f"the server did not come up (exit status {process.poll()})")


@pytest.mark.parametrize(
    ("token", "corpus", "message"),
    [("", "x.jsonl", "PENSTOCK_SEARCH_TOKEN is not set"), ("s3cret", "nowhere.jsonl", "nowhere.jsonl: no such file")],
)
def test_search_server_mistakes_are_one_line(tmp_path: Path, token: str, corpus: str, message: str) -> None:
    done = subprocess.run(
        [*COMMAND, "--corpus", str(tmp_path / corpus)],
        env=environment(token),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, message in done.stderr, "Traceback" in done.stderr) == (2, True, False)
