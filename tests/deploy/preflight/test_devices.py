"""What needs a GPU on a machine without one, and a model that cannot fit: refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.deploy.conftest import RECIPE
from tests.deploy.preflight.preflight_support import assert_refused, failed

from penstock.deploy import load_config
from penstock.deploy.preflight.machine import check_devices, check_gpus, check_size, check_threads
from penstock.deploy.preflight.settings import check_dtype, check_engine, check_training_engine
from penstock.deploy.preflight.suite import FACTS

SMALL_GPU_MIB = 1024
GPU_RECIPES = sorted(RECIPE.parent.glob("*/gpu*.yaml"))
CPU_RECIPES = [RECIPE, *sorted(RECIPE.parent.glob("*/cpu.yaml"))]


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Sizes of a model of about 8 billion parameters, without its weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    sizes = {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8}
    sizes |= {"head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(sizes))
    return str(folder)


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a driver and one small device."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\ncase "$1" in *memory.total) echo {SMALL_GPU_MIB};; *) echo 0;; esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("penstock.deploy.run.plan.DRIVER", tmp_path)


@pytest.fixture
def no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.deploy.run.plan.DRIVER", tmp_path / "nothing")
    monkeypatch.setattr("penstock.deploy.preflight.machine.GPU_DEVICES", (str(tmp_path / "nothing"),))


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("path", GPU_RECIPES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_recipe_for_gpus_is_refused_without_one_whatever_its_model(path: Path) -> None:
    config = load_config(path, [f"model={RECIPE.parent / 'calculator/model'}"])
    problem = check_devices(config)
    assert problem is not None
    assert not problem.ok
    # Those of gpu64 are on other machines.
    assert ("rollout.vllm_args.enforce_eager=false" in problem.found) == (config.rollout.servers > 0)
    assert ("rollout.vllm_args.enforce_eager=true" in problem.fix) == (config.rollout.servers > 0)
    assert ("trainer.offload=false" in problem.fix) == ("offload: true" in path.read_text())


VLLM_ON_CPU = [
    *("rollout.engine=vllm", "rollout.dtype=bfloat16"),
    "rollout.vllm_args={gpu_memory_utilization: 0.5, tensor_parallel_size: 2}",
]


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("path", "words"),
    [*((path, []) for path in CPU_RECIPES), (RECIPE, VLLM_ON_CPU), (RECIPE, ["rollout.weight_transport=nccl"])],
)
def test_what_computes_on_cpus_needs_no_gpu(path: Path, words: list[str]) -> None:
    """vLLM's CPU build takes its share of the host's memory by the same name; nccl falls back to gloo."""
    assert check_devices(load_config(path, words)) is None


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("setting", ["trainer.engine=megatron", "trainer.liger=true", "trainer.offload=true"])
def test_what_computes_on_gpus_alone_is_refused_without_one(setting: str) -> None:
    assert_refused(check_devices, [setting], f"{setting.removesuffix('=true')}.*; .*{setting.partition('=')[0]}")
    assert list(check_gpus(load_config(RECIPE, [setting]))) == [], "one finding of GPUs, not two that contradict"
    assert [one.verdict for one in check_gpus(load_config(RECIPE))] == ["skip"]


@pytest.mark.usefixtures("gpu")
def test_a_ranks_share_of_the_cores_is_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.deploy.preflight.machine.cores", lambda: 8)
    of = lambda *settings: check_threads(load_config(RECIPE, ["trainer.ranks=2", *settings]))  # noqa: E731
    share, one, many, all_ = (
        of(*words)
        for words in (["trainer.offload=true"], [], ["trainer.threads=9"], ["trainer.threads=4", "rollout.servers=1"])
    )
    assert (share.verdict, one.verdict, many.verdict, all_.verdict) == ("ok", "ok", "FAIL", "warn")
    assert "2 ranks of 4" in share.found
    assert "2 ranks of 1" in one.found
    assert "trainer.threads=8" in many.fix


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ([], "set rollout.dtype=bfloat16, or trainer.dtype=float32"),
        (["rollout.dtype=float16"], "set rollout.dtype=bfloat16"),
        (["rollout.dtype=bfloat16", "trainer.dtype=float32"], "set rollout.dtype=float32, or trainer.dtype=bfloat16"),
        (["rollout.dtype=bfloat16"], None),
        (["trainer.dtype=float32"], None),
    ],
)
def test_two_types_of_one_model_are_warned_of(words: list[str], fix: str | None) -> None:
    problem = check_dtype(load_config(RECIPE, words))
    assert (problem.fix if problem else None) == fix
    assert problem is None or problem.verdict == "warn"


@pytest.mark.usefixtures("no_gpu")
def test_the_type_of_ranks_elsewhere_is_left_to_the_trainer() -> None:
    assert check_dtype(load_config(RECIPE, ["rollout.dtype=bfloat16"])) is None


@pytest.mark.usefixtures("gpu")
def test_with_a_gpu_nothing_is_missing() -> None:
    assert check_devices(load_config(RECIPE, ["trainer.engine=megatron"])) is None


@pytest.mark.usefixtures("no_gpu")
def test_a_model_larger_than_the_machine_is_refused(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.deploy.preflight.machine.memory_bytes", lambda: 120 << 30)
    # float32 weights, gradients and moments are 16 bytes of each of 8 billion
    assert_refused(check_size, [f"model={model}"], model)
    monkeypatch.setattr("penstock.deploy.preflight.machine.memory_bytes", lambda: 512 << 30)
    assert failed(check_size, f"model={model}") == {}


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("settings", "who", "fix"),
    [
        ((), "a trainer rank keeps", "trainer.ranks"),
        (
            ("trainer.offload=true", "trainer.lora.rank=1", "rollout.engine=vllm"),
            "a rollout server keeps",
            "tensor_parallel_size",
        ),
    ],
)
def test_a_model_larger_than_a_device_is_refused(model: str, settings: tuple[str, ...], who: str, fix: str) -> None:
    assert_refused(check_size, [f"model={model}", *settings], f"{who}.* of 1\\.0 GiB.*; .*{fix}")


def test_a_model_of_unknown_size_is_left_to_the_engines() -> None:
    assert check_size(load_config(RECIPE, ["model=no-such/model"])) is None


@pytest.mark.torch
@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        ("{pipeline: 8}", "num_hidden_layers 36, which trainer.parallel.pipeline 8"),
        ("{tensor: 16}", "num_key_value_heads 8, which trainer.parallel.tensor 16"),
        ("{expert: 2}", "num_experts None, which trainer.parallel.expert 2"),
    ],
)
def test_a_model_that_megatron_cannot_split_so_is_refused_at_start(model: str, parallel: str, said: str) -> None:
    words = [f"model={model}", "trainer.engine=megatron", "trainer.ranks=16", f"trainer.parallel={parallel}"]
    assert_refused(check_training_engine, words, said)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("changes", "ranks", "said"),
    [
        ({"model_type": "qwen3"}, 2, "trainer.parallel.expert is 2, and Qwen3ForCausalLM has no layers with experts"),
        ({"model_type": "qwen3_moe", "num_experts": 8}, 16, "does not divide the 8 experts: set it to 8"),
        ({"model_type": "qwen3_moe", "num_experts": 8}, 4, ""),
    ],
)
def test_experts_that_the_ranks_cannot_share_are_refused_at_start(
    model: str, changes: dict[str, object], ranks: int, said: str
) -> None:
    file = Path(model) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_hidden_layers": 2, **changes}))
    check = check_training_engine(
        load_config(RECIPE, [f"model={model}", "trainer.ranks=16", f"trainer.parallel.expert={ranks}"])
    )
    assert check is not None
    assert check.ok == (not said)
    assert said in check.found


def test_an_engine_built_for_gpus_is_refused_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = json.dumps({"versions": {"vllm": "0.33.0"}, "plugin": True, "nccl": ""})
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{answer}'\n")
    python.chmod(0o755)
    config = load_config(RECIPE, ["rollout.engine=vllm", f"rollout.vllm_python={python}"])
    monkeypatch.setattr("penstock.deploy.preflight.settings.GPU_DEVICES", (str(tmp_path / "nothing"),))
    check = check_engine(config)
    assert not check.ok
    assert "vllm 0.33.0" in check.found
    assert "scripts/setup-vllm" in check.fix
    monkeypatch.setattr("penstock.deploy.preflight.settings.GPU_DEVICES", (str(tmp_path),))
    assert check_engine(config).ok


def test_a_run_is_refused_with_them() -> None:
    assert {check_devices, check_dtype, check_size, check_engine} <= set(FACTS)
