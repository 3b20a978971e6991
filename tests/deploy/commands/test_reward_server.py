"""`penstock reward-server` as a process: it says where it is, scores, and ends on SIGTERM."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.tiny_model import SHAPE, save_tokenizer
from typer.testing import CliRunner

from penstock.deploy import app

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch
TOKEN = "only-for-this-test"
ROOT = Path(__file__).parents[3]


@pytest.fixture
def model(tmp_path: Path) -> str:
    import transformers

    config = transformers.Qwen3Config(**{**SHAPE, "num_labels": 1, "pad_token_id": 0})
    transformers.Qwen3ForSequenceClassification(config).float().save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model", config.vocab_size)
    return str(tmp_path / "model")


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
def server(model: str, port: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "penstock.deploy.cli", "reward-server", "--model", model, "--port", str(port)]
    environment = {**os.environ, "PENSTOCK_REWARD_TOKEN": TOKEN, "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()


def test_it_scores_until_it_is_told_to_end(server: subprocess.Popen[str], port: int) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        deadline = time.monotonic() + 90
        while True:
            try:
                health = client.get("/health")
                break
            except httpx.TransportError:
                assert time.monotonic() < deadline
                assert server.poll() is None, server.communicate()
                time.sleep(0.2)
        assert health.status_code == 200
        # None repeats the question's token or is the padding: either would score as the question alone.
        items = [{"messages": [{"role": "user", "content": "t3"}], "answer": f"t{n}"} for n in range(10, 15)]
        scores = client.post("/score", json={"items": items}).json()["scores"]
        assert len(set(scores)) == 5
    server.send_signal(signal.SIGTERM)
    _, said = server.communicate(timeout=60)
    assert server.returncode == 0, said
    assert f"POST http://127.0.0.1:{port}/score" in said


def test_what_is_missing_is_one_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PENSTOCK_REWARD_TOKEN", raising=False)
    told = CliRunner().invoke(app, ["reward-server", "--model", str(tmp_path)])
    assert (told.exit_code, "PENSTOCK_REWARD_TOKEN is not set" in told.stderr) == (2, True)
    monkeypatch.setenv("PENSTOCK_REWARD_TOKEN", TOKEN)
    told = CliRunner().invoke(app, ["reward-server", "--model", str(tmp_path / "nowhere")])
    assert told.exit_code == 2
    assert "nowhere" in told.stderr
