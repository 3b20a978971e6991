"""What layers save waits on the host: the same bits, less memory of the device, and copies in an order that holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, call

import pytest

torch = pytest.importorskip("torch")

from image_rows import mixed_rows
from tests.tiny_model import save_tiny_model
from tests.vision_model import save_qwen3_vl
from trainer_support import one_pack

from benchmarks.support.meter import peak_bytes
from penstock.trainer import TrainerConfig, pack_rows
from penstock.trainer.engines.fsdp import load_policy, sharded
from penstock.trainer.engines.fsdp.activation_offload import (
    ActivationOffload,
    HostBuffers,
    SideStream,
    offload_activations,
)

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")
MODULE = "penstock.trainer.engines.fsdp.activation_offload"


@pytest.fixture
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models save tiny tensors."""
    monkeypatch.setattr(f"{MODULE}.SMALLEST_BYTES", 1)


@pytest.mark.usefixtures("every_size")
def test_the_device_holds_what_two_layers_save_and_gradients_have_the_same_bits(tmp_path: Path) -> None:
    """The buffers on the host are there before, so that what is counted is the device's side."""
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
                update()
            peaks[recompute, offloaded] = peak_bytes(update, policy)
            gradients.append([one.grad for one in policy.parameters()])
            policy.zero_grad(set_to_none=True)
    for found in gradients[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found, gradients[0], strict=True))
    assert peaks[False, True] < 0.5 * peaks[False, False]
    inputs = layers * tokens * 64 * 4
    assert peaks[True, False] - peaks[True, True] > 0.6 * inputs, "of eight inputs six are gone"


@pytest.mark.deep
@pytest.mark.usefixtures("every_size")
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


class Logged(torch.autograd.Function):
    """y = x · x, which saves x; says when it runs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str, log: list[str]) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.name, ctx.log = name, log
        log.append(f"forward {name}")
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (x,) = ctx.saved_tensors
        ctx.log.append(f"backward {ctx.name}")
        return 2 * x * gradients[0], None, None


class Layer(torch.nn.Module):
    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__()
        self.name, self.log = name, log
        self.weight = torch.nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Logged.apply(x, self.name, self.log) * self.weight


class SpiedCopies:
    """Copies at once, and numbers them."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.count = log, 0

    def copy(self, pairs: Any) -> int:
        for target, source in pairs:
            target.copy_(source)
        self.count += 1
        self.log.append(f"copy {self.count}")
        return self.count

    def join(self, copied: int) -> None:
        self.log.append(f"join {copied}")


def stack(log: list[str], count: int) -> tuple[ActivationOffload, list[Layer]]:
    offload = ActivationOffload(CPU, SpiedCopies(log), HostBuffers(pinned=False, chunk_bytes=4096))
    layers = [Layer(str(number), log) for number in range(count)]
    for layer in layers:
        offload.wrap(layer)
    return offload, layers


def through(layers: list[Layer], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


@pytest.mark.usefixtures("every_size")
def test_copies_leave_a_layer_later_and_come_back_a_layer_ahead() -> None:
    """Each layer saves two storages: its input, and the square that the weight is multiplied with. Those of layer 0 are
    freed when layer 2 begins, those of layers 2 and 3 never; no copy's memory is given up before it was joined."""
    log: list[str] = []
    _, layers = stack(log, 4)
    x = torch.full((64,), 1.01, requires_grad=True)
    out = through(layers, x)
    assert log == [
        *["forward 0", "copy 1", "copy 2", "forward 1"],
        *["join 1", "join 2", "copy 3", "copy 4", "forward 2"],
        *["join 3", "join 4", "copy 5", "copy 6", "forward 3"],
    ]  # fmt: skip
    del log[:]
    out.sum().backward()
    backwards = [log.index(f"backward {number}") for number in range(4)]
    assert backwards == sorted(backwards, reverse=True)
    # Layer 1's are copied back when the backward of layer 2 begins, layer 0's when that of layer 1 begins.
    assert [log.index(f"copy {number}") < backwards[2] for number in (7, 8)] == [True, True]
    assert log.index("copy 8") < log.index("copy 9") < backwards[1] < backwards[0]
    assert all(log.index(f"join {number}") < backwards[1] for number in (7, 8))
    assert all(log.index(f"join {number}") < backwards[0] for number in (9, 10))
    assert "copy 11" not in log
    for number in range(5, 11):
        assert f"join {number}" in log
    plain = torch.full((64,), 1.01, requires_grad=True)
    y = plain
    for _ in range(4):
        y = y * y
    y.sum().backward()
    torch.testing.assert_close(x.grad, plain.grad)


@pytest.mark.usefixtures("every_size")
def test_buffers_are_used_again_whatever_lengths_come() -> None:
    log: list[str] = []
    offload, layers = stack(log, 6)
    through(layers, torch.ones(5000, requires_grad=True).narrow(0, 0, 64)).sum().backward()
    for length in (64, 320, 64, 1280):
        for layer in layers:
            layer.weight = torch.nn.Parameter(torch.ones(length))
        through(layers, torch.ones(length, requires_grad=True)).sum().backward()
    held, longest = offload.buffers.nbytes, 10 * 1280 * 4
    assert longest <= held <= longest + 6 * 4096
    for length in (1280, 7, 900, 1280):
        for layer in layers:
            layer.weight = torch.nn.Parameter(torch.ones(length))
        through(layers, torch.ones(length, requires_grad=True)).sum()  # no backward: the graph is dropped
        through(layers, torch.ones(length, requires_grad=True)).sum().backward()
    assert offload.buffers.nbytes == held


def test_a_buffer_is_cut_over_chunks_and_kept_while_any_of_it_is_in_use() -> None:
    buffers = HostBuffers(pinned=False, chunk_bytes=2048)
    first, second, third = buffers.take(3000), buffers.take(10), buffers.take(600)
    assert [[len(piece.bytes) for piece in one] for one in (first, second, third)] == [[2048, 952], [10], [512, 88]]
    starts = [piece.bytes.data_ptr() - piece.chunk.bytes.data_ptr() for piece in (*first, *second, *third)]
    assert starts == [0, 0, 1024, 1536, 0]
    assert buffers.nbytes == 3 * 2048
    buffers.give_back(first)
    fourth = buffers.take(2048)
    assert [len(piece.bytes) for piece in fourth] == [1536, 512], "the rest of the third chunk, then the first one"
    assert fourth[1].chunk is first[0].chunk
    assert first[1].chunk is second[0].chunk, "of the second chunk ten bytes are in use: it waits"
    assert buffers.nbytes == 3 * 2048


@pytest.mark.usefixtures("every_size")
def test_views_of_one_storage_are_copied_once_and_parameters_never() -> None:
    log: list[str] = []
    offload = ActivationOffload(CPU, SpiedCopies(log), HostBuffers(pinned=False, chunk_bytes=4096))

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.rand(8, 8))

        def forward(self, x: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
            halves = torch.sin(x[:4]), torch.cos(x[4:].t())
            return torch.cat([halves[0] @ self.weight, halves[1].t() * shared[4:]]) + x * 0

    layers = [Twice() for _ in range(3)]
    for layer in layers:
        offload.wrap(layer)
    shared, x = torch.rand(8, 8), torch.rand(8, 8, requires_grad=True)
    y = x
    for layer in layers:
        y = layer(y, shared)
    # Of two layers the input, which two operations save, and its sine; of all of them the one that they share.
    assert sum(line.startswith("copy") for line in log) == 2 * 2 + 1
    (found,) = torch.autograd.grad(y.sum(), x)
    again = x
    for layer in layers:
        again = Twice.forward(layer, again, shared)
    (expected,) = torch.autograd.grad(again.sum(), x)
    assert torch.equal(found, expected)


@pytest.mark.usefixtures("every_size")
def test_what_was_changed_after_it_was_saved_is_refused() -> None:
    """As autograd does without hooks."""
    for count in (1, 3):
        log: list[str] = []
        _, layers = stack(log, count)
        x = torch.ones(64, requires_grad=True) * 1
        saved = layers[0](x)
        with torch.no_grad():
            x.add_(1)
        out = through(layers[1:], saved)
        with pytest.raises(RuntimeError, match=r"shape \[64\] .* changed in place"):
            out.sum().backward()


@pytest.mark.usefixtures("every_size")
def test_what_is_saved_again_after_a_change_is_another_tensor() -> None:
    """The backward needs the later values alone, which is allowed."""

    class Changing(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 1
            self.unused = torch.sin(y)  # lives on, and so does what it saved
            y.add_(1)
            return torch.cos(y)

    offload, layers = ActivationOffload(CPU), [Changing() for _ in range(4)]
    for layer in layers:
        offload.wrap(layer)
    x = torch.rand(64, requires_grad=True)
    (found,) = torch.autograd.grad(torch.nn.Sequential(*layers)(x).sum(), x)
    y = x
    for _ in layers:
        y = torch.cos(y + 1)
    assert torch.equal(found, torch.autograd.grad(y.sum(), x)[0])


def test_a_side_stream_waits_before_it_copies_and_is_waited_for() -> None:
    cuda, tensors = MagicMock(), [MagicMock(), MagicMock()]
    side = cuda.Stream.return_value
    cuda.attach_mock(tensors[0], "target")
    stream = SideStream(CPU, cuda)
    stream.join(stream.copy([(tensors[0], tensors[1])]))
    waited = call.current_stream().wait_event(side.record_event.return_value)
    order = [
        *(call.Stream().wait_stream(cuda.current_stream.return_value), call.stream().__enter__()),
        *(call.target.copy_(tensors[1], non_blocking=True), call.stream().__exit__(None, None, None)),
        *(call.Stream().record_event(), waited),
    ]
    assert [one for one in cuda.mock_calls if one in order] == order
    cuda.stream.assert_called_once_with(side)
