"""The GPUs of each role on one machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.deploy.conftest import RECIPE

from penstock.common import visible_devices
from penstock.deploy import RunConnection, RunDir, load_config, roles_of
from penstock.deploy.preflight.machine import check_apart
from penstock.deploy.run.plan import LOADS_AFTER_VARIABLE, gpus_of, gpus_of_server, visible_gpus
from penstock.deploy.run.processes import RESTARTS_VARIABLE
from penstock.deploy.run.roles import engines_before
from penstock.deploy.run.supervisor import LocalPlacement

LINK = RunConnection("redis://127.0.0.1:1", "r", None, "token")
VLLM = ("rollout.engine=vllm", "agent.workers=1")
BY_TWO = 'rollout.vllm_args={"tensor_parallel_size":2}'
EIGHT = {f"rollout-{number}": str(number) for number in range(8)}


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ((), 0),
        (("rollout.engine=vllm",), 1),
        (("rollout.engine=vllm", "rollout.vllm_args={tensor_parallel_size: 4}"), 4),
        (("rollout.engine=vllm", "rollout.vllm_args={tensor-parallel-size: 2, pipeline-parallel-size: 3}"), 6),
        (("rollout.engine=sglang", "rollout.sglang_args={tp_size: 2}"), 2),
        (("rollout.engine=sglang", "rollout.vllm_args={tensor_parallel_size: 4}"), 1),
        (("rollout.engine=vllm", "rollout.vllm_args={tensor_parallel_size: 2, data_parallel_size: 4}"), 8),
        (("rollout.engine=vllm", "rollout.vllm_args={data-parallel-size: 2, enable-expert-parallel: true}"), 2),
        (("rollout.engine=sglang", "rollout.sglang_args={tp_size: 4, dp_size: 2, ep_size: 4}"), 8),
        (("rollout.engine=sglang", "rollout.sglang_args={tp_size: 4, dp_size: 4, enable_dp_attention: true}"), 4),
    ],
)
def test_a_server_takes_what_its_model_is_split_over(words, count):
    assert gpus_of_server(load_config(RECIPE, words).rollout) == count


@pytest.mark.parametrize(
    ("count", "words", "expected"),
    [
        (8, "trainer.ranks=4 rollout.servers=4",
         {"trainer": "0123", "rollout-0": "4", "rollout-1": "5", "rollout-2": "6", "rollout-3": "7"}),
        (8, f"trainer.ranks=2 rollout.servers=2 rollout.evaluation_server=true {BY_TWO}",
         {"trainer": "01", "rollout-0": "23", "rollout-1": "45", "rollout-eval": "67"}),
        (8, f"trainer.ranks=4 rollout.servers=2 placement.lend=true {BY_TWO}",
         {"trainer": "0123", "rollout-0": "45", "rollout-1": "67", "rollout-lent-0": "01", "rollout-lent-1": "23"}),
        (8, "trainer.ranks=8 rollout.servers=8 placement.colocated=true", {"trainer": "01234567", **EIGHT}),
        (1, "placement.colocated=true", {"trainer": "0", "rollout-0": "0"}),
        (1, "rollout.servers=2", {"trainer": "0", "rollout-0": "0", "rollout-1": "0"}),
        (3, "trainer.ranks=2 rollout.servers=2", {"trainer": "01", "rollout-0": "2", "rollout-1": "0"}),
        (2, 'rollout.vllm_args={"tensor_parallel_size":4}', {"trainer": "0", "rollout-0": "10"}),
        (8, "rollout.engine=hf", {"trainer": "0", "rollout-0": None}),
        (0, "", {"trainer": None, "rollout-0": None}),
    ],
)  # fmt: skip
def test_each_role_has_its_own_gpus_from_the_trainers_on(count: int, words: str, expected: dict[str, str | None]):
    config = load_config(RECIPE, [*VLLM, *words.split()])
    gpus = tuple(map(str, range(count)))
    shares = {role.name: gpus_of(role, config, gpus) for role in roles_of(config, LINK)}
    assert {name: own and "".join(own) for name, own in shares.items()} == {"agent-0": None, **expected}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", ()), ("-1", ()), ("NoDevFiles", ()), ("void", ()), ("all", ()),
        ("3", ("3",)), ("2, 5", ("2", "5")), ("1,-1,2", ("1",)), ("GPU-ab,MIG-c", ("GPU-ab", "MIG-c")),
    ],
)  # fmt: skip
def test_the_environment_limits_the_gpus(value, expected, monkeypatch, caplog):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert (visible_gpus(), visible_devices()) == (expected, expected)
    assert ("CUDA takes for none" in caplog.text) == (value == "all")


QUERY = '[ "$*" = "--query-gpu=index --format=csv,noheader,nounits" ]'


@pytest.mark.parametrize(
    ("program", "expected"),
    [(f'{QUERY} && printf "0\\n1\\n"', ("0", "1")), ("exit 9", ()), (None, ())],
    ids=["answers", "fails", "is not installed"],
)
def test_the_driver_is_asked_without_a_variable(tmp_path: Path, monkeypatch, caplog, program, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("penstock.deploy.run.plan.DRIVER", tmp_path)
    if program:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    assert visible_gpus() == expected
    assert ("nvidia-smi does not say which GPUs there are" in caplog.text) == (expected == ())


async def test_processes_of_this_machine_get_their_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    config = load_config(RECIPE, [*VLLM, f"runs_dir={tmp_path}", "rollout.servers=2"])
    run, placement = RunDir.of(config), LocalPlacement()
    async with placement.open(config, run):
        environments = {role.name: placement.place(role, run).spec.env for role in roles_of(config, LINK)}
    own = {name: environment["CUDA_VISIBLE_DEVICES"] for name, environment in environments.items()}
    assert own == {"trainer": "4", "rollout-0": "5", "rollout-1": "6", "agent-0": "4,5,6"}


@pytest.mark.parametrize(
    ("gpus", "words", "before"),
    [
        ("0", "rollout.servers=2", ["rollout-0", "rollout-1"]),
        ("0,1,2", "rollout.servers=3", ["rollout-2"]),
        ("0,1", "", None),
        ("0", "rollout.engine=hf", None),
        ("0", "placement.colocated=true", None),
    ],
)
async def test_the_trainer_loads_after_the_engines_on_its_gpus(tmp_path, monkeypatch, gpus, words, before):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    config = load_config(RECIPE, [*VLLM, f"runs_dir={tmp_path}", *words.split()])
    run, placement = RunDir.of(config), LocalPlacement()
    async with placement.open(config, run):
        environments = {role.name: placement.place(role, run).spec.env for role in roles_of(config, LINK)}
    assert [name for name, env in environments.items() if LOADS_AFTER_VARIABLE in env] == (
        ["trainer"] if before else []
    )
    monkeypatch.setattr("os.environ", environments["trainer"])
    assert engines_before(run) == [run.logs / f"{name}-engine" / "up.lock" for name in before or ()]
    monkeypatch.setattr("os.environ", {**environments["trainer"], RESTARTS_VARIABLE: "1"})
    assert engines_before(run) == []


@pytest.mark.parametrize(
    ("words", "count", "sound"),
    [
        (("rollout.servers=3",), 4, [True]),
        (("rollout.servers=4",), 4, [False]),
        (("rollout.servers=1",), 1, [False]),
        (("rollout.servers=1", BY_TWO), 2, [True]),
        (("rollout.servers=2", "trainer.ranks=2"), 4, [True]),
        (("rollout.servers=2", "trainer.ranks=3", BY_TWO), 4, [False]),
        (("rollout.servers=1", "rollout.weight_transport=broadcast"), 1, []),
    ],
)
def test_nccl_is_refused_if_a_member_has_a_ranks_gpu(words: tuple[str, ...], count: int, sound: list[bool]) -> None:
    config = load_config(RECIPE, ["rollout.engine=vllm", "rollout.weight_transport=nccl", *words])
    assert config.rollout.manifest_transport == "broadcast"
    checks = list(check_apart(config, count))
    assert [check.ok for check in checks] == sound
    assert all("weight_transport" in check.name and (check.ok or "broadcast" in check.fix) for check in checks)
