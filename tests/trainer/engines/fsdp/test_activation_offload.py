"""What layers save waits on the host: the same bits, less memory of the device."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import numpy as np
from image_rows import mixed_rows
from tests.tiny_model import save_tiny_model
from tests.vision_model import save_qwen3_vl
from trainer_support import one_pack

from benchmarks.support.meter import peak_bytes
from penstock.trainer import TrainerConfig, pack_rows
from penstock.trainer.engines.fsdp import load_policy, sharded
from penstock.trainer.engines.fsdp.activation_offload import offload_activations
from penstock.trainer.engines.fsdp.host_states import bytes_of

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")
MODULE = "penstock.trainer.engines.fsdp.activation_offload"


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each copy to the host, whose memory torch's profiler does not see. Tiny models save tiny tensors."""
    sizes: list[int] = []

    def copy_to_host(storage: torch.UntypedStorage) -> torch.Tensor:
        sizes.append(storage.nbytes())
        host = torch.from_numpy(np.empty(storage.nbytes(), np.uint8))
        return host.copy_(bytes_of(storage))

    monkeypatch.setattr(f"{MODULE}.SMALLEST_BYTES", 1)
    monkeypatch.setattr(f"{MODULE}.copy_to_host", copy_to_host)
    return sizes


@pytest.mark.usefixtures("copies")
def test_the_device_holds_what_one_layer_saves_and_gradients_have_the_same_bits(tmp_path: Path) -> None:
    layers, tokens = 8, 256
    sizes = {"hidden_size": 64, "num_hidden_layers": layers, "max_position_embeddings": 2048}
    policy, pack = load_policy(save_tiny_model(tmp_path, **sizes), 1.0), one_pack(tokens, vocab=64)
    blocks = sharded._blocks(policy)
    update = lambda: policy(pack).logprobs.sum().backward()  # noqa: E731
    peaks, gradients = {}, []
    for recompute in (False, True):
        for block in blocks:
            block.__dict__.pop("forward", None)
            sharded._prepare(block, TrainerConfig(recompute=recompute))
        for offloaded in (False, True):
            if offloaded:
                offload_activations(blocks, CPU)
            peaks[recompute, offloaded] = peak_bytes(update, policy)
            gradients.append([one.grad for one in policy.parameters()])
            policy.zero_grad(set_to_none=True)
    for found in gradients[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found, gradients[0], strict=True))
    assert peaks[False, True] < 0.5 * peaks[False, False]
    inputs = layers * tokens * 64 * 4
    assert peaks[True, False] - peaks[True, True] > 0.6 * inputs, "of eight inputs seven are gone"


@pytest.mark.deep
@pytest.mark.usefixtures("copies")
def test_a_vision_tower_s_layers_wait_on_the_host_too(tmp_path: Path) -> None:
    """Its layers run before those of the text, some of which are given its features."""
    policy, gradients = load_policy(save_qwen3_vl(tmp_path), 1.0), []
    (pack,) = pack_rows(mixed_rows(), 10_000, layout=policy.rows.layout)
    for offloaded in (False, True):
        if offloaded:
            offload_activations(sharded._blocks(policy), CPU)
        policy.zero_grad(set_to_none=True)
        policy(pack).logprobs.sum().backward()
        gradients.append([one.grad for one in policy.parameters()])
    assert any("visual" in name for name, _ in policy.named_parameters())
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_views_of_one_storage_are_copied_once_and_parameters_never(copies: list[int]) -> None:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.rand(8, 8))

        def forward(self, x: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
            halves = torch.sin(x[:4]), torch.cos(x[4:].t())
            return torch.cat([halves[0] @ self.weight, halves[1].t() * shared[4:]]) + x * 0

    layers = [Twice() for _ in range(3)]
    offload_activations(layers, CPU)
    shared, x = torch.rand(8, 8), torch.rand(8, 8, requires_grad=True)
    y = x
    for layer in layers:
        y = layer(y, shared)
    # The input, which two operations save, its sine, and what all layers share.
    assert len(copies) == 3 * 3
    (found,) = torch.autograd.grad(y.sum(), x)
    again = x
    for layer in layers:
        again = Twice.forward(layer, again, shared)
    (expected,) = torch.autograd.grad(again.sum(), x)
    assert torch.equal(found, expected)


@pytest.mark.usefixtures("copies")
def test_what_is_saved_again_after_a_change_is_another_tensor() -> None:
    """The backward needs the later values alone, which is allowed."""

    class Changing(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 1
            self.unused = torch.sin(y)  # lives on, and so does what it saved
            y.add_(1)
            return torch.cos(y)

    layers = [Changing() for _ in range(4)]
    offload_activations(layers, CPU)
    x = torch.rand(64, requires_grad=True)
    (found,) = torch.autograd.grad(torch.nn.Sequential(*layers)(x).sum(), x)
    y = x
    for _ in layers:
        y = torch.cos(y + 1)
    assert torch.equal(found, torch.autograd.grad(y.sum(), x)[0])
