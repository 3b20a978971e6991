"""Memory and speed settings change memory and speed: the numbers stay those of the plain engine."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.tiny_model import save_tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_support import one_pack
from transformers import AutoModelForCausalLM

from benchmarks.support.meter import peak_bytes
from penstock.common import cores
from penstock.trainer import CORES_VARIABLE, Ranks, TrainerConfig
from penstock.trainer.config import AdamSettings
from penstock.trainer.engine import Flops, Update, peak_tflops, update_speed
from penstock.trainer.engines.fsdp import FSDPEngine, host_states, load_policy, sharded
from penstock.trainer.engines.fsdp import engine as engine_module
from penstock.trainer.engines.fsdp.host_states import on_this_rank
from penstock.trainer.engines.megatron import engine as megatron_engine
from penstock.trainer.engines.megatron.engine import MegatronEngine
from penstock.trainer.job import threads_here
from penstock.trainer.ranks.distributed import TorchThread

pytestmark = pytest.mark.torch


def trained(model: str, ranks: Ranks, **settings: Any) -> tuple[FSDPEngine, list[Update]]:
    """Three updates towards higher logprobs of two rows."""
    config = TrainerConfig(**{"lr": 1e-2, "eps": 1e-4, "dtype": "float32", **settings})
    engine, pack = FSDPEngine(model, config, ranks), one_pack(60, vocab=64)
    loss = lambda pack, outputs: -outputs.logprobs.sum()  # noqa: E731
    return engine, [engine.update([pack], loss, 52.0, step) for step in range(3)]


@pytest.mark.parametrize("largest", [0.0, 0.1])
def test_gradients_add_up_until_a_step_that_brings_its_own_settings(
    largest: float, tiny_model: str, ranks: Ranks
) -> None:
    adam, loss = {"lr": 3e-3, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1}, lambda _, out: -out.logprobs.sum()
    packs = [one_pack(tokens, vocab=64) for tokens in (60, 40)]
    at_once = FSDPEngine(tiny_model, TrainerConfig(**adam, max_grad_norm=largest or 1e9, dtype="float32"), ranks)
    apart = FSDPEngine(tiny_model, TrainerConfig(dtype="float32"), ranks)
    for step in range(2):
        expected = at_once.update(packs, loss, 52.0, step)
        total = sum(apart.accumulate([pack], loss, 52.0) for pack in packs)
        update = apart.step(AdamSettings(**adam, max_grad_norm=largest), total)
        assert (update.loss, update.grad_norm) == pytest.approx((expected.loss, expected.grad_norm), rel=1e-5)
    for (name, tensor), (_, other) in zip(apart.weights(torch.float32), at_once.weights(torch.float32), strict=True):
        torch.testing.assert_close(tensor, other, atol=1e-6, rtol=1e-5, msg=name)


COMPILED = pytest.param(
    "compile", True, marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("recompute", True), ("recompute", "selective"), ("offload", True), ("offload", "optimizer"), COMPILED],
)
def test_a_setting_changes_no_number(setting: str, value: Any, tiny_model: str, ranks: Ranks) -> None:
    assert_equal(trained(tiny_model, ranks), trained(tiny_model, ranks, **{setting: value}))


@pytest.mark.deep
def test_compiled_layers_change_no_number_and_share_their_graphs(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs of their own would be too many in a deep model: torch then stops compiling, with a warning. What torch
    makes of a graph is its own affair, and would take minutes on a CPU: the graphs are run as they were captured."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    layers, graphs = 3, torch._dynamo.utils.counters["stats"]
    model, before = save_tiny_model(tmp_path, num_hidden_layers=layers), graphs["unique_graphs"]
    assert_equal(trained(model, ranks), trained(model, ranks, compile=True))
    assert 0 < graphs["unique_graphs"] - before < 2 * layers, "attention cuts each layer in two"


def assert_equal(given_by: tuple[FSDPEngine, list[Update]], found_by: tuple[FSDPEngine, list[Update]]) -> None:
    (plain, expected), (engine, found) = given_by, found_by
    for one, other in zip(found, expected, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
    given = dict(plain.weights(torch.float32))
    assert given.keys() == dict(engine.weights(torch.float32)).keys()
    for name, tensor in engine.weights(torch.float32):
        torch.testing.assert_close(tensor, given[name], atol=2e-5, rtol=0, msg=name)


class GradientAdditions(TorchDispatchMode):
    """Counts what is added to gradients that the optimizer reads: under `offload` they are on the host."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.count, self._module = 0, module

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add_.Tensor:
            gradients = (one.grad for one in self._module.parameters() if one.grad is not None)
            self.count += args[0].data_ptr() in {on_this_rank(one).data_ptr() for one in gradients}
        return func(*args, **(kwargs or {}))


def test_packs_add_up_on_the_device_under_offload(tiny_model: str, ranks: Ranks) -> None:
    """In bfloat16, where a sum that was not in float32 would be seen."""
    packs = [one_pack(length, vocab=64) for length in (60, 30, 45)]
    offloads: tuple[Any, ...] = (False, True, "optimizer")
    engines = {on: FSDPEngine(tiny_model, TrainerConfig(dtype="bfloat16", offload=on), ranks) for on in offloads}
    for engine in engines.values():
        for step in range(2):
            with GradientAdditions(engine.policy) as additions:
                engine.update(packs, lambda pack, outputs: -outputs.logprobs.sum(), 130.0, step)
            if engine.config.offload is True:
                assert additions.count == 0, "each of them would cross the bus and wait for one core"
            else:
                assert additions.count > 0, "it is seen"
    expected = dict(engines[False].weights(torch.float32))
    for on in (True, "optimizer"):
        for name, tensor in engines[on].weights(torch.float32):
            torch.testing.assert_close(tensor, expected[name], atol=0, rtol=0, msg=name)


@pytest.mark.parametrize("offload", [False, "optimizer"])
@pytest.mark.parametrize("part_bytes", [4096, 1 << 30])
def test_a_turn_is_counted_as_its_tensors_lie(
    tiny_model: str, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, offload: Any, part_bytes: int
) -> None:
    """The most is on the device in the middle of a step: then, without offload, all of it."""
    monkeypatch.setattr(host_states, "PART_BYTES", part_bytes)
    on_device, step = list[int](), torch.optim.AdamW.step

    def step_and_count(self: Any, closure: Any = None) -> None:
        step(self, closure)
        parameters = list(engine.policy.parameters())
        gradients = [one.grad for one in parameters if one.grad is not None]
        moments = [one for key in self.param_groups[0]["params"] for one in self.state[key].values()]
        on_device.append(sum(on_this_rank(one).nbytes for one in (*parameters, *gradients, *moments)))

    monkeypatch.setattr(torch.optim.AdamW, "step", step_and_count)
    config = TrainerConfig(dtype="float32", offload=offload)
    engine, pack = FSDPEngine(tiny_model, config, ranks), one_pack(60, vocab=64)
    engine.update([pack], lambda pack, outputs: -outputs.logprobs.sum(), 52.0, 0)
    assert engine.turn_bytes == max(on_device)


@pytest.mark.parametrize("offload", [True, "optimizer"])
def test_an_update_waits_for_the_checkpoint_that_is_written_from_its_states(
    offload: Any, tiny_model: str, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written before the update asks to change the states; the run that goes on from there is the same."""
    config, pack = TrainerConfig(lr=1e-2, dtype="float32", offload=offload), one_pack(60, vocab=64)
    asked = threading.Event()
    loss = lambda pack, outputs: -outputs.logprobs.sum()  # noqa: E731
    wait, write_data = engine_module.wait, engine_module.HashingWriter.write_data

    def wait_and_tell(*arguments: Any) -> Any:
        asked.set()
        return wait(*arguments)

    def write_later(self: Any, *plan: Any) -> Any:
        asked.wait()
        return write_data(self, *plan)

    monkeypatch.setattr(engine_module, "wait", wait_and_tell)
    monkeypatch.setattr(engine_module.HashingWriter, "write_data", write_later)
    engine = FSDPEngine(tiny_model, config, ranks)
    engine.update([pack], loss, 52.0, 0)
    future = engine.begin_save(tmp_path)
    try:
        engine.update([pack], loss, 52.0, 1)
    finally:
        asked.set()
        future.result()
    resumed = FSDPEngine(tiny_model, config, ranks)
    resumed.load(tmp_path, 1)
    resumed.update([pack], loss, 52.0, 1)
    expected = dict(engine.weights(torch.float32))
    for name, tensor in resumed.weights(torch.float32):
        torch.testing.assert_close(tensor, expected[name], atol=0, rtol=0, msg=name)


@pytest.mark.parametrize("offload", [False, "optimizer"])
def test_a_checkpoint_before_the_first_update_changes_no_update(
    offload: bool | str, tiny_model: str, ranks: Ranks, tmp_path: Path
) -> None:
    config, pack = TrainerConfig(lr=1e-2, dtype="float32", offload=offload), one_pack(60, vocab=64)
    plain, saving, resumed = (FSDPEngine(tiny_model, config, ranks) for _ in "123")
    saving.begin_save(tmp_path).result()
    resumed.load(tmp_path, 1)
    for engine in (plain, saving, resumed):
        engine.update([pack], lambda pack, outputs: -outputs.logprobs.sum(), 52.0, 0)
    expected = dict(plain.weights(torch.float32))
    for engine in (saving, resumed):
        for name, tensor in engine.weights(torch.float32):
            torch.testing.assert_close(tensor, expected[name], atol=0, rtol=0, msg=name)


def test_bfloat16_has_masters_and_moments_in_float32(tiny_model: str, ranks: Ranks) -> None:
    _, expected = trained(tiny_model, ranks)
    engine, found = trained(tiny_model, ranks, dtype="bfloat16")
    assert {p.dtype for p in engine.policy.parameters()} == {torch.float32}
    assert {s["exp_avg"].dtype for s in engine.optimizer.state.values()} == {torch.float32}
    assert found[0].loss != expected[0].loss, "it did compute in bfloat16"
    for one, other in zip(found, expected, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=0.02)
    assert found[2].loss < found[0].loss


def test_a_small_change_is_not_lost_in_bfloat16(tiny_model: str, ranks: Ranks) -> None:
    """An update far below bfloat16's spacing is in the published float32 weights, also after scoring with them."""
    config = TrainerConfig(lr=1e-6, dtype="bfloat16")
    engine, pack = FSDPEngine(tiny_model, config, ranks), one_pack(60, vocab=64)
    before = dict(engine.weights(torch.float32))
    engine.update([pack], lambda pack, outputs: -outputs.logprobs.sum(), 52.0, 0)
    engine.score([pack])
    name = "model.layers.0.mlp.up_proj.weight"
    change = (dict(engine.weights(torch.float32))[name] - before[name]).abs()
    assert 0 < float(change.max()) < 1e-5
    assert float((change > 0).float().mean()) > 0.9


def test_a_reference_is_kept_as_its_arithmetic_has_it(tiny_model: str, ranks: Ranks) -> None:
    """Under bfloat16 the default takes half the memory and says the same to the bit; else bfloat16 is asked for."""
    pack, said = one_pack(60, vocab=64), {}
    for dtype in ("float32", "bfloat16"):
        for kept in (None, "float32", "bfloat16"):
            kl = {"in_loss": 0.01, "reference_dtype": kept}
            engine = FSDPEngine(tiny_model, TrainerConfig(dtype=dtype, kl=kl), ranks)
            assert {one.dtype for one in engine.reference.module.parameters()} == {getattr(torch, kept or dtype)}
            (said[dtype, kept],) = engine.score_reference([pack])
    for dtype in ("float32", "bfloat16"):
        assert torch.equal(said[dtype, None], said[dtype, "float32"])
    assert torch.equal(said["bfloat16", None], said["bfloat16", "bfloat16"])
    rounded = (said["float32", "bfloat16"] - said["float32", None]).abs().max()
    assert 0 < float(rounded) < 0.2


@pytest.mark.parametrize(
    ("settings", "device", "dtype"),
    [
        ({}, "cpu", "float32"),
        ({}, "cuda", "bfloat16"),
        ({"dtype": "float32"}, "cuda", "float32"),
        ({"dtype": "bfloat16"}, "cpu", "bfloat16"),
    ],
)
@pytest.mark.parametrize("engine", [FSDPEngine, MegatronEngine])
def test_an_engine_computes_in_bfloat16_on_a_gpu_unless_it_is_told(
    engine: Any, settings: dict[str, Any], device: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends where it begins to load: no device is needed."""

    class LoadedConfig(Exception):
        pass

    def load(*arguments: Any, **_: Any) -> None:
        raise LoadedConfig(next(one for one in arguments if isinstance(one, TrainerConfig)).dtype)

    monkeypatch.setattr(engine_module, "load_policy", load)
    monkeypatch.setattr(megatron_engine, "check_machine", load)
    with pytest.raises(LoadedConfig, match=dtype):
        engine("models/none", TrainerConfig(**settings), SimpleNamespace(device=torch.device(device)))


def test_a_gpu_of_known_peak_has_an_mfu_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    ranks: Any = SimpleNamespace(device=torch.device("cuda"), world=1)
    flops = Flops(1, 1, 1, learns_all=True)
    for settings, has_mfu in (({}, True), ({"dtype": "float32"}, False)):
        speed = update_speed(flops, TrainerConfig.model_validate(settings), ranks, (10, 10, 10), 1.0)
        assert ("mfu" in speed) is has_mfu


def test_a_critic_in_bfloat16_learns_without_masters(tiny_model: str, ranks: Ranks) -> None:
    config = TrainerConfig(advantage="gae", critic={"dtype": "bfloat16", "lr": 1e-2}, eps=1e-4)
    engine, pack = FSDPEngine(tiny_model, config, ranks), one_pack(60, vocab=64)
    losses = [engine.update_critic([pack], lambda pack, values: (values - 1).square().sum(), 52.0).loss for _ in "1234"]
    critic = engine.critic
    assert critic is not None
    assert {one.dtype for one in critic.module.parameters()} == {torch.bfloat16}
    assert {state["exp_avg"].dtype for state in critic.optimizer.state.values()} == {torch.bfloat16}
    assert {one.dtype for one in engine.policy.parameters()} == {torch.float32}
    assert losses[-1] < losses[0]


def test_recomputed_activations_need_less_memory(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 6, "max_position_embeddings": 2048}
    model, pack = save_tiny_model(tmp_path, **sizes), one_pack(1024, vocab=64)
    peaks = {}
    for recompute in (False, "selective", True):
        policy = load_policy(model, 1.0)
        for block in sharded._blocks(policy):
            sharded._prepare(block, TrainerConfig(recompute=recompute))
        peaks[recompute] = peak_bytes(lambda policy=policy: policy(pack).logprobs.sum().backward(), policy)
    assert peaks[True] < 0.5 * peaks[False]
    assert peaks[True] < 0.9 * peaks["selective"] < 0.9 * 0.8 * peaks[False]


def test_threads_are_one_unless_adamw_is_the_hosts() -> None:
    """A rank's share of the cores, and no more than the recipe says."""
    there = {"cores": 32, "ranks": 8}
    assert TrainerConfig().threads_of_rank(**there, on_gpu=False) == 1
    assert TrainerConfig().threads_of_rank(**there, on_gpu=True) == 1
    assert TrainerConfig(offload=True).threads_of_rank(**there, on_gpu=False) == 1
    assert TrainerConfig(offload=True).threads_of_rank(**there, on_gpu=True) == 4
    assert TrainerConfig(offload=True).threads_of_rank(cores=2, ranks=8, on_gpu=True) == 1
    assert TrainerConfig(offload=True, threads=3).threads_of_rank(**there, on_gpu=True) == 3


async def test_the_torch_thread_has_its_ranks_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    for config, expected in ((TrainerConfig(), 1), (TrainerConfig(offload=True), cores())):
        in_torch = TorchThread(threads_here(config))
        assert await in_torch(torch.get_num_threads) == expected
        in_torch.close()


def test_ranks_share_the_cores_that_are_reserved_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("penstock.trainer.job.cores", lambda: 32)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for reserved, share in ((None, 8), ("4", 1), ("16", 4), ("64", 8)):
        if reserved is not None:
            monkeypatch.setenv(CORES_VARIABLE, reserved)
        assert threads_here(TrainerConfig(offload=True)) == share
        assert threads_here(TrainerConfig(offload=True, threads=3)) == 3
        assert threads_here(TrainerConfig()) == 1


def test_flops_by_hand(tmp_path: Path) -> None:
    """Hidden 32, 2 layers: q 32·32, k and v 32·16 each, o 32·32, three of 32·64; the head 64·32."""
    model = load_policy(save_tiny_model(tmp_path), 1.0).model
    found, lora = Flops.of(model, learns_all=True), Flops.of(model, learns_all=False)
    assert found is not None
    assert lora is not None
    body = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64)
    assert (found.body, found.head, found.attention) == (body, 64 * 32, 2 * 4 * 8)
    assert found.of_update(10, 4, 10 * 10) == 3 * 2 * (body * 10 + 64 * 32 * 4 + 64 * 100)
    assert lora.of_update(10, 4, 100) == pytest.approx(found.of_update(10, 4, 100) * 2 / 3)


def test_flops_of_a_mixture_are_those_of_what_one_token_meets(tmp_path: Path) -> None:
    """As above, with a router of 32·4 and two of four experts of 3·32·16 in place of the MLP."""
    folder = save_tiny_model(tmp_path, "Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    found = Flops.of(AutoModelForCausalLM.from_pretrained(folder), learns_all=True)
    attention = 32 * 32 + 2 * 32 * 16 + 32 * 32
    assert found == Flops(2 * (attention + 32 * 4 + 2 * 3 * 32 * 16), 64 * 32, 2 * 4 * 8, learns_all=True)


def test_flops_of_layers_with_a_state_are_not_counted(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "Qwen3Next")
    assert Flops.of(AutoModelForCausalLM.from_pretrained(folder), learns_all=True) is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA H200 NVL", 835.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_the_peak_is_that_of_the_card(name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_tflops(None, torch.device("cuda"), "bfloat16") == peak
    assert peak_tflops(100.0, torch.device("cuda"), "bfloat16") == 100.0


def test_an_unknown_device_has_no_peak_unless_it_is_told() -> None:
    assert peak_tflops(None, torch.device("cpu"), "bfloat16") is None
    assert peak_tflops(1.5, torch.device("cpu"), "float32") == 1.5
