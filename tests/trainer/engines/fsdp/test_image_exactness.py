"""Any conversation with images: what the engine was fed is what the trainer's model reads, id for id, pixel for pixel.

messages ─► chat ─► segment ─► trajectory ─► payload ─► row ─► pack ─► ids and pixels of the model
"""

from __future__ import annotations

import asyncio
import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from tests.vision_model import save_vision_model

from penstock.agent_loops import AgentConfig, Budget, ChatTokens, images_of, to_trajectory, tool_messages
from penstock.agent_loops.chat import chat_of
from penstock.rollout_server import Generation
from penstock.tools import ToolResult
from penstock.trainer import ModelLimits, make_step_batch, pack_rows
from penstock.trainer.engines.fsdp import Policy, load_policy
from penstock.transfer_queue import Batch, Lease, Task, decode_trajectory, encode_trajectory

pytestmark = pytest.mark.torch
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
SIZES = st.tuples(st.integers(28, 180), st.integers(28, 180))
PICTURE = st.tuples(SIZES, st.integers(0, 3), st.sampled_from(["PNG", "JPEG"]))
TURNS = st.lists(st.tuples(st.booleans(), st.lists(PICTURE, max_size=2), st.integers(1, 6)), min_size=1, max_size=4)
"""Of each turn: whether a tool brings the images or the user, which, and how much the model says."""


def drawn(size: tuple[int, int], seed: int, kind: str) -> bytes:
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, kind)
    return written.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return save_vision_model(tmp_path_factory.mktemp("tiny-vlm"))


@pytest.fixture(scope="module")
def policy(folder: str) -> Policy:
    return load_policy(folder, 1.0)


@pytest.fixture(scope="module")
def shared(folder: str) -> ChatTokens:
    return chat_of(folder, AgentConfig())


@settings(max_examples=15)
@given(TURNS, st.booleans())
def test_the_trainer_reads_what_the_engine_was_fed(
    shared: ChatTokens, policy: Policy, folder: str, tmp_path_factory: Any, turns: Any, in_files: bool
) -> None:
    chat, where = shared.for_episode(Budget(50, 100_000)), tmp_path_factory.mktemp("pictures") if in_files else None
    fed, pictures, lease, output = converse(chat, turns, where)
    images = asyncio.run(images_of(lease, [output]))
    sent = to_trajectory(lease, [output], 1.0, {}, {}, images=images)
    trajectory = decode_trajectory(encode_trajectory(sent))
    if images is not None:
        assert set(images.urls) | set(images.data) == {name for names in images.by_segment for name in names}

    limits = ModelLimits(4096, 400, image_token=policy.vision.image_token)
    (row,) = make_step_batch(Batch(0, [[lease.episode_id]]), [0], [trajectory], 0, limits).rows
    assert row.ids.tolist() == fed
    (pack,) = pack_rows([row], 4096, layout=policy.rows.layout)
    assert pack.images == ([pictures] if pictures else [])

    ids, seen = policy.vision.look(pack.ids[None], pack.images)
    expected = by_processor(folder, pictures)
    assert ids[0, : len(fed)].tolist() == fed
    if pictures:
        assert torch.equal(seen["pixel_values"], expected["pixel_values"])
        assert torch.equal(seen["image_grid_thw"], expected["image_grid_thw"])
        runs = expected["image_grid_thw"].prod(-1) // 4
        assert lengths_of_runs(seen["mm_token_type_ids"][0]) == runs.tolist()
    assert torch.equal(seen["mm_token_type_ids"] == 1, ids == policy.vision.image_token)


def converse(chat: ChatTokens, turns: Any, folder: Path | None) -> tuple[list[int], list[bytes], Lease, Any]:
    """(all ids, all images in the order of their places, lease, the loop's output); `folder`: of the task's files."""
    pictures: list[bytes] = []

    def shown(specs: Any, folder: Path | None = None) -> list[str]:
        found = []
        for number, spec in enumerate(specs):
            data = drawn(*spec)
            pictures.append(data)
            if folder is None:
                found.append(f"data:image/{spec[2].lower()};base64,{base64.b64encode(data).decode()}")
            else:
                (folder / f"{number}.img").write_bytes(data)
                found.append(str(folder / f"{number}.img"))
        return found

    def user(where: list[str]) -> dict[str, Any]:
        return {"role": "user", "content": [*({"type": "image", "image": one} for one in where), words]}

    words = {"type": "text", "text": "What colour?"}
    first = user(shown(turns[0][1], folder))
    segment = chat.start([first])
    for place, (_, _, count) in enumerate(turns):
        following = turns[place + 1] if place + 1 < len(turns) else None
        says = CALL if following is not None and following[0] else "blue " * count
        ids = [*chat.encode(says), chat.turn_end_id]
        reply = Generation(ids, [-0.1] * len(ids), [(0, 0, len(ids))], "stop", text=chat.decode(ids))
        segment.append_sampled(reply)
        if following is not None:
            brought = shown(following[1])
            messages = tool_messages([ToolResult("see", tuple(brought))]) if following[0] else [user(brought)]
            assert chat.go_on(segment, reply, messages) is segment
    lease = Lease("t#0", Task("t", "train", [first], "looks", "red"), 0, 0, 1, 0)
    return segment.context(), pictures, lease, segment.output()


def by_processor(folder: str, pictures: list[bytes]) -> Any:
    """The pixels as transformers' own image processor makes them of all images at once."""
    from PIL import Image
    from transformers import AutoImageProcessor

    if not pictures:
        return {}
    opened = [Image.open(io.BytesIO(data)).convert("RGB") for data in pictures]
    return AutoImageProcessor.from_pretrained(folder)(opened, return_tensors="pt")


def lengths_of_runs(marks: torch.Tensor) -> list[int]:
    """How many marks stand together, by run."""
    edges = torch.nn.functional.pad(marks, (1, 1)).diff()
    return ((edges == -1).nonzero() - (edges == 1).nonzero()).flatten().tolist()
