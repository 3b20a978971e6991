"""What an engine holds after a load: exactly the version, or exactly the one before."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.rollout_server.conformance.subject import BROADCASTS, PROMPT, Subject
from tests.rollout_server.conftest import VOCAB, Reference, ask, whole

from penstock.weight_sync import Manifest, WeightsRefused

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(900)]
LONG_PROMPT = [(5 * i + 1) % VOCAB for i in range(300)]
"""Longer than two blocks of any engine's prefix cache; vLLM's have 128 tokens each on a CPU."""
EMBEDDING = "model.embed_tokens.weight"


async def exactly(subject: Subject, reference: Reference, version: int, tensors: Mapping[str, Any]) -> None:
    """Greedy and drawn answers are those of a plain forward pass of `tensors`, which the reference has from now on."""
    reference.use(dict(tensors))
    greedy = await whole(subject.engine, ask(PROMPT, 8, temperature=0.0))
    assert greedy.version_spans == [(version, 0, 8)]
    subject.greedy(reference, PROMPT, greedy.token_ids)
    drawn = await whole(subject.engine, ask(PROMPT, 30))
    subject.close(drawn.logprobs, reference.logprobs(PROMPT, drawn.token_ids))


async def test_logprobs_equal_a_plain_forward_pass_before_and_after_an_update(
    subject: Subject, reference: Reference
) -> None:
    for tensors in (reference.first, reference.other(1), reference.first):
        await exactly(subject, reference, await subject.load(reference, tensors), tensors)


async def test_prefixes_are_reused_and_never_over_a_swap(subject: Subject, reference: Reference) -> None:
    await subject.load(reference, reference.first)
    request = ask(LONG_PROMPT, 4)
    assert await subject.reused(request) == 0
    assert await subject.reused(request) >= 256
    tasks = await subject.under_load(2)  # requests in flight keep a cache from being flushed
    version = await subject.load(reference, reference.other(2))
    assert await subject.reused(request) == 0
    reference.use(reference.other(2))
    answer = await whole(subject.engine, ask(LONG_PROMPT, 8))
    assert answer.version_spans == [(version, 0, 8)]
    subject.close(answer.logprobs, reference.logprobs(LONG_PROMPT, answer.token_ids))
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("subject", BROADCASTS, indirect=True)
async def test_a_broadcast_that_begins_while_a_file_is_loaded_is_received(
    subject: Subject, reference: Reference
) -> None:
    """A server that reads files takes its place in the next broadcast all the same."""
    assert subject.trainer is not None
    first, second = next(subject.versions), next(subject.versions)
    loads = subject.engine.load_weights(reference.publish(first, reference.other(6)))
    sends = subject.trainer.publish(second, reference.other(7), members=1)
    loaded, manifest = await asyncio.gather(loads, sends)
    assert loaded.version == first
    subject.holds_first = False
    subject.reports.append(await subject.engine.load_weights(await subject.fetch(manifest)))
    await exactly(subject, reference, second, reference.other(7))


async def test_changes_of_the_version_before_lead_to_exactly_the_new_weights(
    subject: Subject, reference: Reference, tmp_path: Path
) -> None:
    from penstock.weight_sync import WeightPublisher

    reference.publisher = WeightPublisher(tmp_path / "deltas", "shm", keep=9, full_every=5)
    tensors = {name: tensor.bfloat16() for name, tensor in reference.first.items()}
    kinds = []
    for step in range(8):
        tensors[EMBEDDING][step::97] += 0.25
        tensors["model.layers.1.self_attn.k_proj.weight"][step::13] -= 0.125
        version = next(subject.versions)
        manifest = reference.publish(version, tensors)
        kinds.append("full" if manifest.base_version is None else "delta")
        if step in {2, 6}:  # missed: the next one is applied over its link
            continue
        assert (await subject.engine.load_weights(manifest)).version == version
        await exactly(subject, reference, version, {name: tensor.float() for name, tensor in tensors.items()})
    assert kinds == ["full", *["delta"] * 4, "full", *["delta"] * 2]
    subject.holds_first = False


async def test_tied_embeddings_load_right_under_one_name_or_both(subject: Subject, reference: Reference) -> None:
    tied = reference.other(3)
    assert "lm_head.weight" not in tied
    await exactly(subject, reference, await subject.load(reference, tied), tied)
    changed = {**tied, EMBEDDING: reference.other(4)[EMBEDDING]}
    both = {**changed, "lm_head.weight": changed[EMBEDDING]}
    version = await subject.load(reference, both)
    await exactly(subject, reference, version, both)
    torn = {**both, "lm_head.weight": both[EMBEDDING] + 1}
    with pytest.raises(WeightsRefused, match=r"lm_head\.weight.* tied but differ"):
        await subject.load(reference, torn)
    await exactly(subject, reference, version, both)


def break_checksum(plain: dict[str, Any]) -> str:
    plain["tensors"][3]["xxh3"] = "0" * 16
    return plain["tensors"][3]["name"]


def break_bytes(plain: dict[str, Any]) -> str:
    path = Path(plain["path"])
    data = bytearray(path.read_bytes())
    data[-2] ^= 0xFF
    path.write_bytes(data)
    return plain["tensors"][-1]["name"]


def break_file(plain: dict[str, Any]) -> str:
    path = Path(plain["path"])
    path.write_bytes(path.read_bytes()[:-100])
    return path.name


def lose_file(plain: dict[str, Any]) -> str:
    path = Path(plain["path"])
    path.unlink()
    return path.name


@pytest.mark.parametrize("damage", [break_checksum, break_bytes, break_file, lose_file])
async def test_damaged_weights_are_refused_by_name_and_the_old_ones_stay(
    subject: Subject, reference: Reference, damage: Any
) -> None:
    version = await subject.hold_first(reference)
    plain = reference.publish(next(subject.versions), reference.other(2)).as_dict()
    name = damage(plain)
    with pytest.raises(WeightsRefused, match=name):
        await subject.engine.load_weights(Manifest.parse(plain))
    await exactly(subject, reference, version, reference.first)
    assert await subject.engine.healthy()


async def test_missing_surplus_and_misshapen_tensors_are_refused_by_name(
    subject: Subject, reference: Reference
) -> None:
    version = await subject.hold_first(reference)
    name = "model.layers.1.mlp.up_proj.weight"
    missing = {key: value for key, value in reference.first.items() if key != name}
    surplus = {**reference.first, "model.layers.9.mlp.up_proj.weight": reference.first[name]}
    misshapen = {**reference.first, name: reference.first[name][:-1]}
    for tensors, text in ((missing, name), (surplus, "layers.9.mlp"), (misshapen, name)):
        with pytest.raises(WeightsRefused, match=text):
            await subject.load(reference, tensors)
    await exactly(subject, reference, version, reference.first)
