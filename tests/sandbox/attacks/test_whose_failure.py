"""After the first instruction of the policy's code in a box, failures of that box are the policy's.

An episode that could choose `infra_error` for its own failure would be tried again until it does better, at no cost.
Rewards that run programs have such tests beside them.
"""

from __future__ import annotations

import dataclasses

import pytest
from tests.sandbox.managed.harness import MANAGED, managed_sandbox
from tests.sandbox.swe.conftest import LIMITS, repository, rows, sandbox, task, tasks  # noqa: F401
from tests.sandbox.swe.wordkit import patch_by

from penstock.sandbox import SandboxConfig
from penstock.sandbox.swe import grade

pytestmark = pytest.mark.bwrap
AFTER_A_BUILD = {
    "a folder at the runner's path": "mkdir -p /tmp/.penstock_swe/run_pytest.py/x",
    "no folder of ours": "rm -rf /tmp/.penstock_swe",
    "a file in place of our folder": "rm -rf /tmp/.penstock_swe; touch /tmp/.penstock_swe",
    "no access to /tmp": "chmod 0 /tmp",
}


@pytest.mark.parametrize("door", AFTER_A_BUILD)
async def test_failure_a_build_breaks_its_box(sandbox, task, door, tmp_path):
    built = dataclasses.replace(task, build_command="if [ -e build.sh ]; then sh build.sh; fi")
    patch = patch_by(task.repository, task.base_commit, f"echo '{AFTER_A_BUILD[door]}' > build.sh", tmp_path / "tree")
    found = await grade(sandbox, built, patch, LIMITS.model_copy(update={"decoys": 0}))
    assert not found.resolved
    assert found.doubt


KILLS = {
    "its parent": "kill -9 $PPID",
    "all that it may": "kill -9 -1",
    "its parent, later": "(sleep 0.2; kill -9 -1) &",
}


@pytest.mark.parametrize("kill", KILLS)
@pytest.mark.parametrize(
    "backend", [pytest.param(one, marks=[] if one == "kubernetes" else pytest.mark.deep) for one in sorted(MANAGED)]
)
async def test_failure_code_kills_what_runs_a_managed_box(backend, kill):
    async with managed_sandbox(backend, SandboxConfig(max_boxes=1, run_timeout_s=30.0)) as managed:
        session = await managed.sandbox.start("hostile")
        result = await session.run(["sh", "-c", KILLS[kill] + "; sleep 1"])
        after = await session.run(["echo", "on"])
        assert after.stdout == "on\n"
        assert result.exit_code is not None or result.files_lost
