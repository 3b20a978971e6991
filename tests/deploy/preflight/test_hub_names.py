"""Names of models that are no folders: answered by a hub on loopback."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from penstock.deploy import load_config, run_recipe
from penstock.deploy.config import RECIPES
from penstock.deploy.preflight.check import Check
from penstock.deploy.preflight.model import _check_hub, check_model

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


def check(name: str) -> Check:
    return check_model(load_config(RECIPES / "calculator.yaml", [f"model={name}"]))


def test_a_model_of_the_hub_is_taken() -> None:
    assert (check("known/model").verdict, check("known/model").found) == ("ok", "known/model: on the hub")


def test_a_name_that_the_hub_does_not_know_is_refused() -> None:
    answer = check("no/such-model")
    assert answer.verdict == "FAIL"
    assert answer.found == "no/such-model: neither a folder here nor a model that the hub shows"
    assert "HF_TOKEN" in answer.fix


def test_a_gated_model_names_the_page_of_its_terms() -> None:
    answer = check("gated/model")
    assert answer.verdict == "FAIL"
    assert "https://huggingface.co/gated/model" in answer.fix


def test_a_hub_that_fails_is_a_warning_with_its_answer() -> None:
    answer = check("broken/hub")
    assert answer.verdict == "warn"
    assert "500" in answer.found


def test_a_run_whose_hub_fails_is_refused_before_it_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [f"runs_dir={tmp_path}", "model=broken/hub"]
    assert run_recipe(RECIPES / "calculator.yaml", overrides, resume=False, dry_run=False) == 2
    printed = capsys.readouterr().err
    assert "model: broken/hub" in printed
    assert "fix: " in printed
    assert list(tmp_path.iterdir()) == []


def test_a_name_like_a_fetched_model_is_answered_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert check("smollm2-135").found.endswith("no such folder; did you mean 'smollm2-135m'?")
    assert check("smollm2-135m").found.endswith("`penstock model fetch smollm2-135m` makes it")


@pytest.mark.parametrize("name", ["~/model", "mymodel/", "a--b/c", "my model/x"])
def test_a_path_that_no_hub_name_looks_like_is_refused(name: str) -> None:
    assert check(name).verdict == "FAIL"
