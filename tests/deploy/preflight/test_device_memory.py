"""Memory of engine and trainer on one device, and of every recipe below a folder; no torch, network or GPU is asked."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from tests.deploy.preflight.preflight_support import MODEL, REPOSITORY
from typer.testing import CliRunner, Result

from penstock.deploy import app, load_config
from penstock.deploy.preflight.memory_checks import Gpus, RecipeMemory, check_device, check_recipes, declared_gpus
from penstock.deploy.preflight.model import read_config, read_weights
from penstock.deploy.preflight.model_shape import ModelShape, shape_from_config, shape_of
from penstock.deploy.preflight.rank_memory import trainer_bytes
from penstock.deploy.shipped import shipped_recipes, shipped_sizes

RECIPES = REPOSITORY / "recipes"
ON_GPUS = [one for one in shipped_recipes() if "GPU" in one.needs]
ONE = Gpus(1, 80 << 30)
PARAMETERS = {
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-32B-Instruct": 32_763_876_352,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
}
"""As the hub counts them in the models' files."""
RECIPE = """# One GPU of 80 GB: a test.
model: MODEL
data: {train: train.parquet}
rollout: {engine: vllm, dtype: bfloat16, vllm_args: {gpu_memory_utilization: 0.3}}
trainer: {dtype: bfloat16, recompute: true}
"""


def shipped(model: str) -> ModelShape:
    declared = shipped_sizes(model)
    assert declared is not None
    shape = shape_from_config(declared)
    assert shape is not None
    return shape


# what ships ---------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def checked() -> dict[str, RecipeMemory]:
    return {one.recipe: one for one in check_recipes(RECIPES)}


@pytest.mark.parametrize("recipe", ON_GPUS, ids=[one.file for one in ON_GPUS])
def test_each_gpu_recipe_fits_the_gpu_in_its_header(recipe: Any, checked: dict[str, RecipeMemory]) -> None:
    found = checked[recipe.file]
    assert found.check.verdict == "ok", f"{found.check.found}; fix: {found.check.fix}"
    assert found.gpus == declared_gpus(RECIPES / recipe.file)
    assert found.gpus is not None
    assert f"{found.gpus.count} GPU" in recipe.needs
    assert f"of {found.gpus.bytes >> 30} GB" in recipe.needs, "recipes/index.toml says what the header says"
    assert 0 < sum(found.parts.values()) <= found.limit < found.gpus.bytes
    assert "activations" in found.parts, "of a device that a rank is on"


def test_recipes_for_cpus_are_left_out(checked: dict[str, RecipeMemory]) -> None:
    on_gpus = {one.file for one in ON_GPUS}
    assert checked.keys() == {one.file for one in shipped_recipes() if one.file.endswith(".yaml")}
    assert {name for name, one in checked.items() if one.check.skipped} == checked.keys() - on_gpus


@pytest.mark.parametrize("model", PARAMETERS)
def test_a_config_tells_the_parameters_of_its_weights(model: str) -> None:
    assert shipped(model).parameters == pytest.approx(PARAMETERS[model], rel=1e-3)


def test_config_and_weights_of_one_model_agree() -> None:
    weights, declared = read_weights(MODEL), read_config(MODEL)
    assert weights is not None
    counted, described = shape_of(declared, weights), shape_from_config(declared)
    assert counted is not None
    assert described is not None
    assert (described.layers, described.mlp, described.lora) == (counted.layers, counted.mlp, counted.lora)
    assert described.outer == pytest.approx(counted.outer, rel=1e-2)
    assert described.parameters == pytest.approx(counted.parameters, rel=1e-2)


# one device ---------------------------------------------------------------------------------------------------------
def test_search_r1_without_offload_takes_100_gb() -> None:
    exact = load_config(
        RECIPES / "search_r1/gpu1.yaml", ["trainer.offload=false", "trainer.kl.reference_dtype=float32"]
    )
    found = check_device("x", exact, shipped(exact.model), ONE)
    assert not found.ok
    assert re.search(r"about 93\.\d GiB of 72\.0 GiB", found.found), "100 GB"
    assert "trainer.offload=optimizer" in found.fix
    config = load_config(RECIPES / "search_r1/gpu1.yaml", ["trainer.offload=false"])
    found = check_device("x", config, shipped(config.model), ONE)
    assert not found.ok
    assert re.search(r"about 88\.\d GiB of 72\.0 GiB", found.found), "94 GB: the reference has no masters"
    assert "trainer.offload=optimizer" in found.fix


def test_a_large_mixture_on_fsdp_does_not_fit_eight_gpus_of_80_gb() -> None:
    words = ["trainer.engine=fsdp", "trainer.parallel={}", "trainer.micro_batch_tokens=16384"]
    config = load_config(RECIPES / "moe_megatron.yaml", [*words, "rollout.max_model_len=16384"])
    found = check_device("x", config, shipped(config.model), Gpus(8, 80 << 30))
    assert not found.ok
    assert re.search(r"about 7[34]\.\d GiB of 72\.0 GiB", found.found), "78 GB"


def test_experts_over_ranks_make_room_for_a_mixture_of_744b() -> None:
    """Each rank of 512 has 23 GB of states; one layer's experts are 19 GB, with their gradients 97."""
    sizes = {"hidden_size": 6144, "num_attention_heads": 64, "head_dim": 128, "num_key_value_heads": 8}
    sizes |= {"intermediate_size": 12288, "num_hidden_layers": 75, "vocab_size": 151552}
    shape = shape_from_config({**sizes, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048})
    assert shape is not None
    words = ["trainer.ranks=512", "rollout.servers=0", "rollout.max_model_len=8192", "trainer.micro_batch_tokens=8192"]
    words += ["trainer.dtype=bfloat16", "trainer.recompute=true", "rollout.engine=hf"]
    gpus = Gpus(512, 80 << 30)
    whole = check_device("x", load_config(RECIPES / "retool/gpu1.yaml", words), shape, gpus)
    assert not whole.ok
    assert "trainer.parallel.expert" in whole.fix
    shared = check_device(
        "x", load_config(RECIPES / "retool/gpu1.yaml", [*words, "trainer.parallel.expert=32"]), shape, gpus
    )
    assert shared.ok, shared.found


def test_engines_that_share_a_device_with_a_rank_count_there() -> None:
    recipe, shape = RECIPES / "retool/gpu8.yaml", shipped("models/retool-7b")
    eight = Gpus(8, 80 << 30)
    assert check_device("x", load_config(recipe), shape, eight).ok
    shared = check_device("x", load_config(recipe, ["rollout.servers=5"]), shape, eight)
    assert not shared.ok, "the fifth server is on the first GPU"
    assert "engines 72.0 GiB" in shared.found
    assert "rollout.vllm_args.gpu_memory_utilization" in shared.fix
    crowded = load_config(recipe, ["rollout.servers=9", "trainer.ranks=4"])
    assert "engines 144.0 GiB" in check_device("x", crowded, shape, eight).found, "two engines on one device"


def test_an_engine_fits_into_its_own_share() -> None:
    config = load_config(RECIPES / "swe/gpu1.yaml", ["rollout.vllm_args.gpu_memory_utilization=0.15"])
    found = check_device("x", config, shipped(config.model), ONE)
    assert not found.ok
    assert "gpu_memory_utilization" in found.fix
    assert "rollout.max_model_len" in found.fix


def test_what_no_setting_spares_names_its_keys() -> None:
    config = load_config(RECIPES / "retool/gpu1.yaml", ["trainer.micro_batch_tokens=400000"])
    assert "trainer.micro_batch_tokens" in check_device("x", config, shipped(config.model), ONE).fix
    large = shipped("Qwen/Qwen2.5-32B-Instruct")
    apart = load_config(RECIPES / "retool/gpu1.yaml", ["rollout.servers=0", "rollout.engine=hf", "trainer.ranks=2"])
    assert "trainer.ranks" in check_device("x", apart, large, Gpus(2, 16 << 30)).fix


def test_the_sum_of_the_large_mixture() -> None:
    config = load_config(RECIPES / "moe_megatron.yaml")
    found = trainer_bytes(shipped(config.model), config.trainer, 1, critic=False)
    assert found["weights"] + found["gradients"] + found["moments"] == pytest.approx(70e9, rel=0.01), (
        "docs/how/megatron.md"
    )
    assert sum(found.values()) == pytest.approx(75e9, rel=0.01), "a checkpoint merges one parameter's state at a time"


# the command --------------------------------------------------------------------------------------------------------
def invoke(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["doctor", *map(str, words)])


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def test_every_recipe_below_a_folder_has_its_line(tmp_path: Path) -> None:
    write(tmp_path, "good.yaml", RECIPE.replace("MODEL", "Qwen/Qwen2.5-1.5B-Instruct"))
    write(tmp_path, "deep/large.yml", RECIPE.replace("MODEL", "Qwen/Qwen2.5-7B-Instruct"))
    write(tmp_path, "mistyped.yaml", RECIPE.replace("recompute", "recompte"))
    write(tmp_path, "broken.yaml", "model: [\n")
    write(tmp_path, "share.yaml", RECIPE.replace("MODEL", "Qwen/Qwen2.5-1.5B-Instruct").replace("0.3", "much"))
    (tmp_path / "latin.yaml").write_bytes("model: für\n".encode("latin-1"))
    write(tmp_path, "unknown.yaml", RECIPE.replace("MODEL", "example/has-this-model"))
    write(tmp_path, "plain.yaml", RECIPE.partition("\n")[2])
    write(tmp_path, "sandbox.yaml", "sandbox: {}\n")
    result = invoke("--recipes", tmp_path, "--json")
    report = json.loads(result.stdout)
    assert (report["ok"], result.exit_code) == (False, 1)
    found = {one["name"]: one for one in report["recipes"]}
    assert {name: one["verdict"] for name, one in found.items()} == {
        **{"good.yaml": "ok", "deep/large.yml": "fail", "mistyped.yaml": "fail", "broken.yaml": "fail"},
        **{"unknown.yaml": "skip", "plain.yaml": "skip", "share.yaml": "fail", "latin.yaml": "fail"},
    }
    large = found["deep/large.yml"]
    assert large["total_bytes"] == pytest.approx(sum(large["parts"].values()), abs=10)
    assert large["total_bytes"] > large["limit_bytes"] == round(0.9 * (80 << 30))
    assert (large["sizes"], large["gpus"]) == ("shipped", {"count": 1, "bytes": 80 << 30})
    assert "trainer.offload=true" in large["fix"]
    assert "trainer.recompte" in found["mistyped.yaml"]["found"]
    assert "rollout.vllm_args.gpu_memory_utilization" in found["share.yaml"]["found"]
    assert "--config" in found["unknown.yaml"]["found"]
    table = invoke("--recipes", tmp_path).stdout
    assert [name for name in found if name not in table] == []
    assert large["fix"] in table


def test_sizes_come_from_the_hubs_cache_or_from_a_named_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {**read_config(MODEL), "num_hidden_layers": 4000}
    cached = tmp_path / "hub" / "models--example--has-this-model"
    write(cached, "refs/main", "abc")
    write(cached, "snapshots/abc/config.json", json.dumps(sizes))
    write(tmp_path, "recipes/one.yaml", RECIPE.replace("MODEL", "example/has-this-model"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    (found,) = check_recipes(tmp_path / "recipes")
    assert (found.sizes, found.check.ok) == ("hub cache", True)
    for named in (MODEL, MODEL / "config.json"):
        report = json.loads(invoke("--recipes", tmp_path / "recipes", "--config", named, "--json").stdout)
        assert report["recipes"][0]["sizes"] == str(named)
        assert report["recipes"][0]["total_bytes"] < sum(found.parts.values())


def test_what_cannot_be_asked_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"kv_lora_rank": 512}))
    refused = {
        "no such folder": ("--recipes", tmp_path / "none"),
        "no recipe below": ("--recipes", tmp_path),
        "goes without": ("--recipes", RECIPES, "--join"),
        "goes with --recipes": ("--config", tmp_path),
        "cannot be read": ("--recipes", RECIPES, "--config", tmp_path / "none"),
        "names its sizes otherwise": ("--recipes", RECIPES, "--config", tmp_path),
    }
    for said, words in refused.items():
        result = invoke(*words)
        assert result.exit_code == 2
        assert said in result.stderr
