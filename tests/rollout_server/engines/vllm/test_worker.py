"""The code in vLLM's workers, without vLLM: stand-ins replace its modules and the device, which records each wait."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
from tests.until import until

torch = pytest.importorskip("torch")

from penstock.weight_sync import Manifest, WeightPublisher

pytestmark = pytest.mark.torch
MODULE = "penstock.rollout_server.engines.vllm.worker"
First, Second = TypeVar("First"), TypeVar("Second")


class Base(Generic[First, Second]):
    """vLLM's `WeightTransferEngine`, as far as ours uses it."""

    update_info_cls: Any

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        self.parallel_config, self.model_config = vllm_config.parallel_config, vllm_config.model_config
        self.device, self.model = device, model

    def parse_update_info(self, plain: dict[str, Any]) -> Any:
        return self.update_info_cls(**plain)


class Model(torch.nn.Linear):  # type: ignore[misc]
    """Two tensors, loaded in place."""

    def load_weights(self, tensors: Any) -> None:
        for name, tensor in tensors:
            self.get_parameter(name).data.copy_(tensor)


STAND_INS: dict[str, dict[str, Any]] = {
    "distributed.weight_transfer.base": {
        "WeightTransferEngine": Base,
        "WeightTransferInitInfo": object,
        "WeightTransferUpdateInfo": object,
    },
    "logger": {"init_logger": lambda name: SimpleNamespace(info=print, critical=print, exception=print)},
    "model_executor.layers.vocab_parallel_embedding": {
        "ParallelLMHead": type("ParallelLMHead", (), {}),
        "VocabParallelEmbedding": type("VocabParallelEmbedding", (), {}),
    },
    "model_executor.model_loader.reload": {
        "initialize_layerwise_reload": lambda model: None,
        "finalize_layerwise_reload": lambda model, config: None,
    },
    "platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: False)},
}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module that vLLM's workers import."""
    monkeypatch.setattr("penstock.weight_sync.files.reader.SHARED_MEMORY", tmp_path)
    for path, names in STAND_INS.items():
        parts = f"vllm.{path}".split(".")
        for end in range(1, len(parts)):
            package = ModuleType(".".join(parts[:end]))
            package.__path__ = []
            monkeypatch.setitem(sys.modules, package.__name__, sys.modules.get(package.__name__, package))
        stand_in = ModuleType(".".join(parts))
        vars(stand_in).update(names)
        monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield importlib.import_module(MODULE)
    sys.modules.pop(MODULE, None)


def engine_of(module: ModuleType, model: Any, device: Any) -> Any:
    parallel = SimpleNamespace(rank=0, data_parallel_index=0)
    config = SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(hf_text_config=None))
    return module.FileWeightEngine(None, config, device, model)


def update_of(phase: str, report: Path, manifest: Manifest | None = None, **more: Any) -> dict[str, Any]:
    report.mkdir(exist_ok=True)
    plain = manifest.as_dict() if manifest else {}
    return {"phase": phase, "workers": 1, "report": str(report), "manifest": plain, **more}


async def test_a_load_is_compared_once_it_is_done_on_the_device_and_no_phase_waits_for_other_streams(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broadcast under way is on a stream of its own; the comparison is in a thread, on another one too."""
    waits, tensors = list[str](), {"weight": torch.ones(3, 2), "bias": torch.ones(3)}
    manifest = WeightPublisher(tmp_path / "published", "shm").write(1, tensors.items())
    stream = SimpleNamespace(synchronize=lambda: waits.append("stream"))
    for name, stand_in in {
        "is_available": lambda: True,
        "synchronize": lambda *_: waits.append("device"),
        "current_stream": lambda *_: stream,
    }.items():
        monkeypatch.setattr(torch.accelerator, name, stand_in)
    compare = module.say_what_differs
    monkeypatch.setattr(module, "say_what_differs", lambda *what: waits.append("comparison") or compare(*what))
    engine = engine_of(module, Model(2, 3), torch.device("cpu"))
    engine.start_weight_update()
    engine.update_weights(update_of("fetch", tmp_path / "read", manifest))
    await until(lambda: list((tmp_path / "read").glob("[0-9]*")))
    assert waits == []
    engine.update_weights(update_of("load", tmp_path / "held", manifest))
    await until(lambda: list((tmp_path / "held").glob("[0-9]*")))
    assert waits == ["stream", "comparison"]
    assert [verdict.read_text() for verdict in (tmp_path / "held").iterdir()] == [""]
    engine.shutdown()


@pytest.mark.parametrize(("workers", "memory"), [(1, "StagedWeights"), (2, "StagedMemory")])
async def test_a_broadcast_that_begins_in_the_middle_of_a_load_arrives_on_the_workers_device(
    workers: int, memory: str, module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until a layer is whole, its parameters are placeholders. Other workers of the server map what arrives."""
    devices = list[Any]()
    engine = engine_of(module, Model(2, 3).to("meta"), torch.device("cuda", 3))
    monkeypatch.setattr(module.Offer, "parse", lambda plain: plain)
    receive = lambda _staged, offer, device: devices.append(device) or "state"  # noqa: E731
    monkeypatch.setattr(getattr(module, memory), "receive", receive)
    engine.update_weights(update_of("stage", tmp_path / "staged", offer={}, workers=workers))
    await until(lambda: list((tmp_path / "staged").glob("[0-9]*")))
    assert devices == [torch.device("cuda", 3)]
    engine.shutdown()
