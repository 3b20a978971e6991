"""The images' health check, beside a real HTTP server."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from penstock.deploy.placements.compose.stack import FILES

PROBE = FILES.parent / "images" / "probe"


def probe(what: str) -> subprocess.CompletedProcess[str]:
    """As its first line says, by the system's interpreter."""
    command = ["/usr/bin/python3", "-IS", str(PROBE), what]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        SimpleHTTPRequestHandler.protocol_version = "HTTP/1.1"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_server_is_well_that_answers_200(url: str) -> None:
    assert probe(f"{url}/").returncode == 0
    for address, reason in ((f"{url}/nothing-of-that-name", "HTTP/1.1 404"), ("http://127.0.0.1:1/", "refused")):
        ill = probe(address)
        assert (ill.returncode, reason in ill.stderr) == (1, True)


def test_a_file_is_well_that_was_touched_lately(tmp_path: Path) -> None:
    file = tmp_path / "heartbeat"
    assert probe(str(file)).returncode == 1
    file.touch()
    assert probe(str(file)).returncode == 0
    os.utime(file, (time.time() - 60, time.time() - 60))
    late = probe(str(file))
    assert late.returncode == 1
    assert re.search(r"not touched for \d+ s", late.stderr)
