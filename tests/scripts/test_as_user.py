"""`scripts/as-user`: what the command is, sees and may not do."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SEEN = """
import os, penstock.sandbox
print(os.getuid(), os.geteuid(), os.getcwd(), os.environ.get("A_TOKEN"), os.environ["HOME"] == os.path.expanduser("~"))
print(os.access(os.environ["HOME"], os.W_OK), os.access(".", os.W_OK), os.path.exists("/root/.bashrc"))
raise SystemExit(7)
"""


def as_user(*command: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "A_TOKEN": "hush", "PYTHONPATH": str(ROOT / "src")}
    argv = [str(ROOT / "scripts" / "as-user"), *command]
    return subprocess.run(argv, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_as_user_without_a_command_says_how() -> None:
    done = as_user()
    assert done.returncode == 125
    assert "scripts/as-user COMMAND" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_as_user_has_a_home_and_no_rights_or_secrets() -> None:
    done = as_user("python3", "-c", SEEN)
    assert done.returncode == 7, done.stderr
    (uid, euid, folder, token, home), rest = (line.split() for line in done.stdout.splitlines())
    assert uid == euid != "0"
    assert (folder, token, home) == (str(ROOT), "None", "True")
    assert rest == ["True", "False", "False"]


def test_as_user_runs_as_whoever_is_no_root() -> None:
    first, again = as_user("sh", "-c", "id -u; scripts/as-user id -u").stdout.split()
    assert first == again != "0"
