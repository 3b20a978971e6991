"""Which role runs where, and what is refused before it costs anything."""

import pytest
from tests.deploy.conftest import RECIPE

from penstock.deploy import ConfigError, load_config
from penstock.deploy.placements.slurm.placement import place, server_gpus


@pytest.mark.parametrize(
    ("overrides", "nodes", "gpus", "layout"),
    [
        (
            ["rollout.servers=3"],
            3,
            0,
            {"trainer_nodes": 1, "first_other": 1, "others": 2, "servers": 3, "workers": 2, "ranks_per_node": 1},
        ),
        ([], 1, 0, {"first_other": 0, "others": 1}),
        (["trainer.ranks=16"], 4, 8, {"trainer_nodes": 2, "ranks_per_node": 8, "trainer_gpus": 8, "first_other": 2}),
    ],
)
def test_layout_of_a_job(overrides: list[str], nodes: int, gpus: int, layout: dict[str, int]) -> None:
    at = place(load_config(RECIPE, overrides), nodes, gpus_per_node=gpus)
    assert {name: getattr(at, name) for name in layout} == layout


def test_a_server_has_the_gpus_that_its_engine_is_split_over() -> None:
    vllm = load_config(RECIPE, ["rollout.engine=vllm", "rollout.vllm_args={tensor-parallel-size: 4}"])
    assert server_gpus(vllm.rollout) == 4
    sglang = load_config(RECIPE, ["rollout.engine=sglang", "rollout.sglang_args={tp_size: 2}"])
    assert server_gpus(sglang.rollout) == 2
    assert server_gpus(load_config(RECIPE).rollout) == 1


@pytest.mark.parametrize(
    ("overrides", "nodes", "options", "message"),
    [
        (["trainer.ranks=3"], 2, {"trainer_nodes": 2}, "trainer.ranks=3 is not divisible by 2 machines"),
        ([], 1, {"trainer_nodes": 2}, "--nodes 1: the trainer alone takes 2"),
        (["rollout.servers=9"], 3, {"gpus_per_node": 4}, "set rollout.servers to at most 8"),
        (["rollout.servers=4"], 1, {"gpus_per_node": 4}, "set rollout.servers to at most 3"),
        (["rollout.servers=1"], 1, {"gpus_per_node": 1}, "with 0 free GPUs each: raise --nodes"),
        (["trainer.ranks=4"], 1, {"gpus_per_node": 2, "trainer_nodes": 1}, "4 trainer ranks on a node"),
        (["trainer.engine=megatron"], 2, {}, "trainer.engine=megatron computes on NVIDIA GPUs"),
        (
            ["trainer.engine=megatron", "trainer.ranks=8", "trainer.parallel.tensor=8"],
            3,
            {"gpus_per_node": 4},
            "trainer.parallel.tensor is 8, and 4 of 8 ranks are on each of 2 machines",
        ),
        (
            ["rollout.engine=vllm", "rollout.vllm_args={tensor_parallel_size: 4, data_parallel_size: 2}"],
            3,
            {"gpus_per_node": 4},
            "a rollout server of 8 GPUs does not fit on a node",
        ),
        (["transfer_queue.url=redis://127.0.0.1:6379"], 2, {}, "transfer_queue.url=redis://127.0.0.1:6379 is reached"),
        (["sandbox.backend=remote", "sandbox.url=http://localhost:8700"], 2, {}, "sandbox.url=http://localhost:8700"),
    ],
)
def test_what_does_not_fit_is_refused(overrides, nodes, options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        place(load_config(RECIPE, overrides), nodes, **options)
