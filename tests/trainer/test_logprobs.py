"""Logprobs in tiles: the plain formula's values and gradients, and a small part of the model's own memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from benchmarks.support.meter import peak_bytes
from penstock.trainer.logprobs import Head, coarse_logprobs, entropies, target_logprobs, token_logprobs

pytestmark = pytest.mark.torch
TOKENS, WIDTH, VOCAB = 13, 8, 30


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows and seven columns: neither divides what is there."""
    monkeypatch.setattr("penstock.trainer.logprobs.VOCAB_TILE", 7)
    monkeypatch.setattr("penstock.trainer.logprobs.CPU_TILE_ELEMENTS", 21)


def inputs(dtype: Any = None, bias: bool = False) -> tuple[Any, Any, Any, Any]:
    torch.manual_seed(0)
    made = [torch.randn(TOKENS, WIDTH), torch.randn(VOCAB, WIDTH), torch.randn(VOCAB) if bias else None]
    hidden, weight, offset = (None if one is None else one.to(dtype).requires_grad_() for one in made)
    return hidden, weight, offset, torch.randint(0, VOCAB, (TOKENS,))


def plain(hidden: Any, weight: Any, bias: Any, targets: Any, head: Head) -> tuple[Any, Any]:
    """All logits at once."""
    logits = torch.nn.functional.linear(hidden, weight, bias).float() * head.scale
    if head.softcap:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    logs = (logits / head.temperature).log_softmax(-1)
    return logs.gather(-1, targets[:, None]).squeeze(-1), -(logs.exp() * logs).sum(-1)


def gradients(compute: Callable[..., Any], given: tuple[Any, ...], factors: tuple[Any, Any]) -> list[Any]:
    found, entropy = compute(*given)[:2]
    total = (found * factors[0]).sum() + (entropy * factors[1]).sum()
    return list(torch.autograd.grad(total, [one for one in given[:3] if one is not None]))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(("temperature", "scale"), [(0.7, 1.3), (2.0, 2.0)])
def test_values_and_gradients_are_those_of_all_logits(
    temperature: float, scale: float, softcap: float | None, bias: bool
) -> None:
    given = inputs(torch.float64, bias)
    hidden, weight, offset, targets = (None if one is None else one for one in given)
    head = Head(temperature=temperature, scale=scale, softcap=softcap)
    found = token_logprobs(hidden, weight, offset, targets, head, with_entropy=True)[:2]
    for mine, expected in zip(found, plain(*given, head), strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)
    factors = (torch.randn(TOKENS), torch.randn(TOKENS))
    mine = gradients(lambda *g: token_logprobs(*g, head, with_entropy=True), given, factors)
    expected = gradients(lambda *g: plain(*g, head), given, factors)
    for one, other in zip(mine, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_a_head_without_settings_is_the_plain_softmax() -> None:
    hidden, weight, _, targets = inputs()
    expected = (hidden @ weight.t()).log_softmax(-1)[torch.arange(TOKENS), targets]
    torch.testing.assert_close(token_logprobs(hidden, weight, None, targets, Head()).logprobs, expected)


def asked_ids(k: int) -> Any:
    """[TOKENS, k] different ones for each token; the first two tokens ask for fewer."""
    ids = torch.stack([torch.randperm(VOCAB)[:k] for _ in range(TOKENS)])
    ids[:2, k // 2 :] = -1
    return ids.int()


def coarse_by_hand(logs: Any, ids: Any) -> Any:
    """Of logprobs [N, V]; 0 in place of −inf, which a sum over nothing has."""
    mine = torch.zeros(len(logs), logs.shape[1], dtype=torch.bool)
    columns = []
    for n, row in enumerate(ids.tolist()):
        mine[n, [token for token in row if token >= 0]] = True
        columns.append(torch.stack([logs[n, token] if token >= 0 else logs.new_zeros(()) for token in row]))
    rest = logs.exp().masked_fill(mine, 0.0).sum(-1)
    last = torch.where(mine.all(-1), 0.0, torch.where(mine.all(-1), 1.0, rest).log())
    return torch.cat([torch.stack(columns), last[:, None]], 1)


@pytest.mark.parametrize("k", [1, 5, VOCAB])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_logprobs_of_other_ids_and_of_the_rest(softcap: float | None, k: int) -> None:
    """In tiles and of all logits at once: values, and gradients beside those of the sampled token and the entropy."""
    hidden, weight, offset, targets = inputs(torch.float64, bias=True)
    head, ids = Head(temperature=0.7, scale=1.3, softcap=softcap), asked_ids(k)
    factors, of_coarse = (torch.randn(TOKENS), torch.randn(TOKENS)), torch.randn(TOKENS, k + 1)

    def total(compute: Callable[[], tuple[Any, Any, Any]]) -> tuple[Any, list[Any]]:
        logprobs, entropy, coarse = compute()
        finite = coarse.masked_fill(coarse == -torch.inf, 0.0)
        summed = (logprobs * factors[0] + entropy * factors[1]).sum() + (finite * of_coarse).sum()
        return finite.detach(), list(torch.autograd.grad(summed, [hidden, weight, offset]))

    def logits() -> Any:
        raw = torch.nn.functional.linear(hidden, weight, offset) * head.scale
        return raw if softcap is None else softcap * torch.tanh(raw / softcap)

    def by_hand() -> tuple[Any, Any, Any]:
        logs = (logits() / head.temperature).log_softmax(-1)
        chosen = logs.gather(-1, targets[:, None]).squeeze(-1)
        return chosen, -(logs.exp() * logs).sum(-1), coarse_by_hand(logs, ids)

    def whole() -> tuple[Any, Any, Any]:
        made = (target_logprobs(logits(), targets, 0.7), entropies(logits(), 0.7))
        return *made, coarse_logprobs(logits(), ids, 0.7)

    expected, slopes = total(by_hand)
    for compute in (lambda: token_logprobs(hidden, weight, offset, targets, head, with_entropy=True, ids=ids), whole):
        found, mine = total(compute)
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
        for one, other in zip(mine, slopes, strict=True):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-5)


def test_a_rest_that_is_nearly_nothing_keeps_its_digits() -> None:
    """One less a sum of float32 numbers has none left at 1e-12."""
    logits = torch.tensor([[0.0, -30.0, -31.0, -29.0]])
    found = coarse_logprobs(logits, torch.tensor([[0]]), 1.0)
    expected = torch.logsumexp(logits[:, 1:].double(), -1)
    assert float(found[0, 1]) == pytest.approx(float(expected[0]), abs=1e-5)


def test_half_precision_adds_up_in_float32() -> None:
    given, head = inputs(torch.bfloat16), Head()
    factors = (torch.ones(TOKENS), torch.zeros(TOKENS))
    mine = gradients(lambda *g: token_logprobs(*g, head, with_entropy=True), given, factors)
    expected = gradients(lambda *g: plain(*g, head), given, factors)
    for one, other in zip(mine, expected, strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one.float(), other.float(), atol=5e-2, rtol=5e-2)


def test_a_frozen_head_has_no_gradient_and_no_token_is_no_error() -> None:
    hidden, weight, _, targets = inputs()
    token_logprobs(hidden, weight.detach(), None, targets, Head())[0].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None
    none, entropy, coarse = token_logprobs(hidden[:0], weight, None, targets[:0], Head())
    none.sum().backward()
    assert none.shape == (0,)
    assert entropy is None
    assert coarse is None
    asked = token_logprobs(hidden[:0], weight, None, targets[:0], Head(), ids=torch.zeros(0, 4, dtype=torch.int32))
    assert asked.coarse is not None
    asked.coarse.sum().backward()
    assert asked.coarse.shape == (0, 5)
    assert not weight.grad.any()


def test_a_hidden_state_that_is_not_finite_spoils_its_token_alone() -> None:
    hidden, weight, _, targets = inputs()
    with torch.no_grad():
        hidden[4] = float("nan")
    found = token_logprobs(hidden, weight, None, targets, Head()).logprobs
    assert found.isnan().nonzero().flatten().tolist() == [4]


def test_peak_memory_is_near_that_of_the_body_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The bound of the promise: 1.2 times what the model's own activations take, with a vocabulary of 16 k."""
    from tests.tiny_model import save_tiny_model
    from trainer_support import one_pack

    from penstock.trainer.engines.fsdp import load_policy
    from penstock.trainer.engines.fsdp.context import whole_part
    from penstock.trainer.engines.fsdp.rows import run_rows

    monkeypatch.undo()
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "vocab_size": 16_384}
    model = save_tiny_model(tmp_path, max_position_embeddings=2048, head_dim=32, **sizes)
    policy, pack = load_policy(model, 1.0), one_pack(tokens=4096, vocab=sizes["vocab_size"])

    def body() -> None:
        part, base = whole_part(pack), policy.model.base_model
        run_rows(lambda inputs: base(**inputs).last_hidden_state, part, policy.rows).sum().backward()

    def everything() -> None:
        policy(pack).logprobs.sum().backward()

    tops = torch.arange(len(pack.targets) * 8).reshape(-1, 8) % sizes["vocab_size"]
    taught = replace(pack, top_ids=tops.int())
    policy.with_coarse = True

    def everything_and_tops() -> None:
        found = policy(taught)
        (found.logprobs.sum() + found.coarse.sum()).backward()

    ratio = peak_bytes(everything, policy) / peak_bytes(body, policy)
    assert peak_bytes(everything_and_tops, policy) / peak_bytes(everything, policy) <= 1.1
    all_logits = len(pack.targets) * sizes["vocab_size"] * 4 / peak_bytes(body, policy)
    assert ratio <= 1.2, f"{ratio:.3f}; one copy of all logits would be {all_logits:.2f}"
    assert all_logits > 0.5, "the measurement would not see logits that are materialised"


def test_logprobs_and_entropies_of_all_logits_are_the_plain_formula() -> None:
    """For an engine that has the logits: z / T, in float32 whatever they came in."""
    torch.manual_seed(1)
    logits, targets = torch.randn(TOKENS, VOCAB).bfloat16(), torch.randint(0, VOCAB, (TOKENS,))
    logs = torch.log_softmax(logits.double() / 0.7, -1)
    found, entropy = target_logprobs(logits, targets, 0.7), entropies(logits, 0.7)
    assert found.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(found.double(), logs[torch.arange(TOKENS), targets], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), -(logs.exp() * logs).sum(-1), atol=1e-5, rtol=1e-5)
