"""Names of models that are no folders: answered by a hub on loopback."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from penstock.deploy import load_config, run_recipe
from penstock.deploy.preflight.model import _check_hub, check_model
from penstock.deploy.recipe_tree import RECIPES

ANSWERS = {
    "known/model": (200, "", b'{"id": "known/model", "modelId": "known/model", "tags": [], "downloads": 0}'),
    "gated/model": (403, "GatedRepo", b"{}"),
    "broken/hub": (500, "", b"{}"),
}


class Hub(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        name = self.path.removeprefix("/api/models/").partition("?")[0]
        status, error, body = ANSWERS.get(name, (404, "RepoNotFound", b"{}"))
        self.send_response(status)
        if error:
            self.send_header("X-Error-Code", error)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing goes to the terminal."""


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr("penstock.deploy.preflight.model.HUB_TIMEOUT_S", 60.0)
    _check_hub.cache_clear()
    yield
    _check_hub.cache_clear()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("name", "verdict", "said"),
    [
        ("known/model", "ok", "known/model: on the hub"),
        ("no/such-model", "FAIL", "neither a folder here nor a model that the hub shows.*HF_TOKEN"),
        ("gated/model", "FAIL", "https://huggingface.co/gated/model"),
        ("broken/hub", "warn", "500"),
        *((name, "FAIL", "") for name in ("~/model", "mymodel/", "a--b/c", "my model/x")),
        ("smollm2-135", "FAIL", r"no such folder; did you mean 'smollm2-135m'\?"),
        ("smollm2-135m", "FAIL", "`penstock model fetch smollm2-135m` makes it"),
    ],
)
def test_a_name_has_the_hubs_answer_or_the_next_step(
    name: str, verdict: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    answer = check_model(load_config(RECIPES / "calculator.yaml", [f"model={name}"]))
    assert answer.verdict == verdict
    assert re.search(said, f"{answer.found}; {answer.fix}")


def test_a_run_whose_hub_fails_is_refused_before_it_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [f"runs_dir={tmp_path}", "model=broken/hub"]
    assert run_recipe(RECIPES / "calculator.yaml", overrides, resume=False, dry_run=False) == 2
    printed = capsys.readouterr().err
    assert "model: broken/hub" in printed
    assert "fix: " in printed
    assert list(tmp_path.iterdir()) == []
