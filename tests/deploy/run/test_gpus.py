from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
from tests.deploy.conftest import RECIPE

from penstock.deploy import RunConnection, RunDir, load_config, roles_of
from penstock.deploy.preflight.machine import check_apart
from penstock.deploy.run.plan import gpus_of, gpus_of_server, visible_gpus
from penstock.deploy.run.supervisor import LocalPlacement

LINK = RunConnection("redis://127.0.0.1:1", "r", None, "token")
EIGHT = tuple("01234567")
VLLM = ("rollout.engine=vllm", "agent.workers=1")


def shares(gpus: tuple[str, ...], *words: str) -> dict[str, str | None]:
    """Role → its GPUs."""
    config = load_config(RECIPE, [*VLLM, *words])
    found = {role.name: gpus_of(role, config, gpus) for role in roles_of(config, LINK)}
    return {name: own and "".join(own) for name, own in found.items()}


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


def test_lent_servers_are_on_the_trainers_gpus():
    split = "rollout.vllm_args={tensor_parallel_size: 2}"
    assert shares(EIGHT, "trainer.ranks=4", "rollout.servers=2", "placement.lend=true", split) == {
        **{"rollout-0": "45", "rollout-1": "67", "rollout-lent-0": "01", "rollout-lent-1": "23"},
        **{"agent-0": None, "trainer": "0123"},
    }


def test_ranks_and_servers_have_gpus_of_their_own():
    found = shares(EIGHT, "trainer.ranks=4", "rollout.servers=4")
    assert found == {
        **{"rollout-0": "4", "rollout-1": "5", "rollout-2": "6", "rollout-3": "7"},
        **{"agent-0": None, "trainer": "0123"},
    }
    found = shares(
        EIGHT,
        "trainer.ranks=2",
        "rollout.servers=2",
        "rollout.evaluation_server=true",
        "rollout.vllm_args={tensor_parallel_size: 2}",
    )
    assert sorted(chain.from_iterable(own for own in found.values() if own)) == list(EIGHT)
    assert (found["trainer"], found["rollout-0"], found["rollout-eval"]) == ("01", "23", "67")


def test_gpus_too_few_are_shared_from_the_first():
    assert shares(("0",), "rollout.servers=2") == {"rollout-0": "0", "rollout-1": "0", "agent-0": None, "trainer": "0"}
    found = shares(("0", "1", "2"), "trainer.ranks=2", "rollout.servers=2")
    assert (found["rollout-0"], found["rollout-1"]) == ("2", "0")
    assert shares(("0", "1"), "rollout.vllm_args={tensor_parallel_size: 4}")["rollout-0"] == "10"


def test_colocated_servers_begin_with_the_trainers_gpus():
    found = shares(EIGHT, "placement.colocated=true", "trainer.ranks=8", "rollout.servers=8")
    assert [found[f"rollout-{n}"] for n in range(8)] == list(EIGHT)
    assert found["trainer"] == "01234567"
    found = shares(("0",), "placement.colocated=true")
    assert (found["rollout-0"], found["trainer"]) == ("0", "0")


def test_the_hf_engine_and_a_machine_without_gpus_are_left_alone():
    assert shares(EIGHT, "rollout.engine=hf")["rollout-0"] is None
    assert set(shares(()).values()) == {None}


@pytest.mark.parametrize(
    ("value", "expected"),
    [("", ()), ("-1", ()), ("3", ("3",)), ("2, 5", ("2", "5")), ("1,-1,2", ("1",)), ("GPU-ab", ("GPU-ab",))],
)
def test_what_the_environment_leaves_us_is_all_there_is(value, expected, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert visible_gpus() == expected


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a driver; the program that is nvidia-smi there."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("penstock.deploy.run.plan.DRIVER", tmp_path)
    return tmp_path / "nvidia-smi"


def test_else_nvidia_smi_is_asked(driver):
    driver.write_text('#!/bin/sh\n[ "$*" = "--query-gpu=index --format=csv,noheader,nounits" ] && printf "0\\n1\\n"\n')
    driver.chmod(0o755)
    assert visible_gpus() == ("0", "1")


@pytest.mark.parametrize("text", [None, "#!/bin/sh\nexit 9\n"])
def test_a_driver_that_does_not_answer_is_told_of(driver, text, caplog):
    if text:
        driver.write_text(text)
        driver.chmod(0o755)
    assert visible_gpus() == ()
    assert "nvidia-smi does not say which GPUs there are" in caplog.text


async def test_processes_on_this_machine_are_told(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    config = load_config(RECIPE, [*VLLM, f"runs_dir={tmp_path}", "rollout.servers=2"])
    placement = LocalPlacement()
    async with placement.open(config, RunDir.of(config)):
        told = {
            role.name: placement.place(role, RunDir.of(config)).spec.env["CUDA_VISIBLE_DEVICES"]
            for role in roles_of(config, LINK)
        }
    assert told == {"trainer": "4", "rollout-0": "5", "rollout-1": "6", "agent-0": "4,5,6"}


@pytest.mark.parametrize(
    ("words", "count", "sound"),
    [
        (("rollout.servers=3",), 4, [True]),
        (("rollout.servers=4",), 4, [False]),
        (("rollout.servers=1",), 1, [False]),
        (("rollout.servers=1", "rollout.vllm_args={tensor_parallel_size: 2}"), 2, [True]),
        (("rollout.servers=1", "rollout.weight_transport=broadcast"), 1, []),
    ],
)
def test_nccl_is_refused_where_a_member_has_rank_0s_gpu(words: tuple[str, ...], count: int, sound: list[bool]) -> None:
    config = load_config(RECIPE, ["rollout.engine=vllm", "rollout.weight_transport=nccl", *words])
    assert config.rollout.manifest_transport == "broadcast"
    found = list(check_apart(config, count))
    assert [check.ok for check in found] == sound
    assert all("weight_transport" in check.name and (check.ok or "broadcast" in check.fix) for check in found)
