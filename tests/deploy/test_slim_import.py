"""The core and `--help` load no torch: agent workers and tools run where no model lives."""

import subprocess
import sys

import pytest

FORBIDDEN = "torch safetensors vllm"


@pytest.mark.parametrize(
    "code",
    [
        "import penstock.deploy.cli",
        "from typer.testing import CliRunner; from penstock.deploy.cli import app;"
        " assert CliRunner().invoke(app, ['--help']).exit_code == 0;"
        " assert CliRunner().invoke(app, ['run', '--help']).exit_code == 0",
        "import penstock.agent_loops.worker, penstock.tools.registry, penstock.sandbox.make",
        "import penstock.transfer_queue.redis.queue, penstock.rollout_server.client, penstock.rollout_server.server",
    ],
)
def test_no_torch(code: str) -> None:
    probe = f"import sys; {code}; sys.exit(' '.join(m for m in {FORBIDDEN!r}.split() if m in sys.modules) or None)"
    ended = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
