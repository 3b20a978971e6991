"""`penstock reward-server` as a process: it says where it is, scores, and ends on SIGTERM."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tests.ports import free_port
from tests.tiny_model import SHAPE, save_tokenizer
from tests.until import until_in_threads
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


def test_it_scores_until_sigterm(model: str) -> None:
    port = free_port()
    command = [sys.executable, "-m", "penstock.deploy.cli", "reward-server", "--model", model, "--port", str(port)]
    environment = {**os.environ, "PENSTOCK_REWARD_TOKEN": TOKEN, "PYTHONPATH": str(ROOT / "src")}
    server = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    def is_up() -> bool:
        assert server.poll() is None, server.communicate()
        with contextlib.suppress(httpx.TransportError):
            return client.get("/health").status_code == 200
        return False

    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        try:
            until_in_threads(is_up)
            # None repeats the question's token or is the padding: either would score as the question alone.
            items = [{"messages": [{"role": "user", "content": "t3"}], "answer": f"t{n}"} for n in range(10, 15)]
            assert len(set(client.post("/score", json={"items": items}).json()["scores"])) == 5
            server.send_signal(signal.SIGTERM)
            _, output = server.communicate(timeout=60)
        finally:
            server.kill()
            server.wait()
    assert (server.returncode, f"POST http://127.0.0.1:{port}/score" in output) == (0, True), output


def test_what_is_missing_is_one_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PENSTOCK_REWARD_TOKEN", raising=False)
    result = CliRunner().invoke(app, ["reward-server", "--model", str(tmp_path)])
    assert (result.exit_code, "PENSTOCK_REWARD_TOKEN is not set" in result.stderr) == (2, True)
    monkeypatch.setenv("PENSTOCK_REWARD_TOKEN", TOKEN)
    result = CliRunner().invoke(app, ["reward-server", "--model", str(tmp_path / "nowhere")])
    assert result.exit_code == 2
    assert "nowhere" in result.stderr
