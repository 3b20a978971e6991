"""Images in the trainer: logprobs and gradients with pixels, engine and trainer beside each other, refusals."""

from __future__ import annotations

import asyncio
import errno
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from image_rows import BLUE, NIGHT, RED, mixed_rows, prompt_of, row_of, segment_of, vision_limits
from safetensors.torch import load_file
from tests.rollout_server.conftest import whole
from tests.rollout_server.engines.hf.test_engine import hf_engine
from tests.rollout_server.seeing import ask_about, ref
from tests.vision_model import save_qwen3_vl, save_vision_model, vision_tokenizer
from trainer_support import run_ranks

from penstock.common import Backoff
from penstock.rollout_server import Generation
from penstock.trainer import BadJob, Ranks, TrainerConfig, make_row, make_step_batch, pack_rows
from penstock.trainer.batch import Row, UntrainableEpisodes, number_tokens
from penstock.trainer.data import images as images_module
from penstock.trainer.engines.fsdp import FSDPEngine, Policy, load_policy
from penstock.trainer.engines.fsdp.rows import RowPlan
from penstock.trainer.packing import RowLayout, join_rows
from penstock.transfer_queue import COMPLETED, Batch, EpisodeImages, Trajectory
from penstock.weight_sync import WeightPublisher

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return save_vision_model(tmp_path_factory.mktemp("tiny-vlm"))


@pytest.fixture(scope="module")
def policy(folder: str) -> Policy:
    return load_policy(folder, 1.0)


def plain_forward(model: Any, folder: str, row: Row) -> torch.Tensor:
    """[N] as anybody would call the model on one row: pixels by its own processor, positions by itself."""
    from PIL import Image
    from transformers import AutoImageProcessor

    ids = torch.from_numpy(row.ids)[None]
    seen: dict[str, Any] = {}
    if row.images:
        opened = [Image.open(io.BytesIO(data)) for data in row.images]
        seen = dict(AutoImageProcessor.from_pretrained(folder)(opened, return_tensors="pt"))
        seen["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    logprobs = model(input_ids=ids, use_cache=False, **seen).logits[0].log_softmax(-1)
    targets = torch.from_numpy(row.targets)
    return logprobs[targets - 1, torch.from_numpy(row.ids)[targets]]


def plain_model(folder: str) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def laid_out(folder: str, layout: RowLayout) -> Policy:
    """With the rows in this layout, whatever it would choose."""
    policy = load_policy(folder, 1.0)
    assert policy.rows.layout is RowLayout.PACKED
    if layout is not policy.rows.layout:
        policy.rows = RowPlan(layout, "sdpa")
        policy.rows.apply(policy.model)
    return policy


LAYOUTS = [RowLayout.PACKED, pytest.param(RowLayout.PADDED, marks=pytest.mark.deep)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_with_images_equal_each_row_alone(folder: str, layout: RowLayout) -> None:
    assert_equal_alone(laid_out(folder, layout), folder)


@pytest.mark.deep
def test_rows_of_a_deepstack_model_equal_each_row_alone(tmp_path: Path) -> None:
    """Qwen3-VL, whose text layers are given features of several layers of the tower."""
    folder = save_qwen3_vl(tmp_path)
    for layout in (RowLayout.PACKED, RowLayout.PADDED):
        assert_equal_alone(laid_out(folder, layout), folder)


def assert_equal_alone(policy: Policy, folder: str) -> None:
    """Logprobs to 1e-5, gradients of all parameters too, the vision tower's among them."""
    rows, model = mixed_rows(), plain_model(folder)
    (pack,) = pack_rows(rows, 10_000, layout=policy.rows.layout)
    alone = {row.episode: plain_forward(model, folder, row) for row in rows}
    torch.cat(list(alone.values())).sum().backward()
    policy.zero_grad()
    found = policy(pack).logprobs
    found.sum().backward()
    expected = torch.cat([alone[episode] for episode in dict.fromkeys(pack.episode.tolist())])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    gradients = {name: one.grad for name, one in model.named_parameters()}
    assert any("visual" in name and gradient.abs().max() > 1e-3 for name, gradient in gradients.items())
    for name, parameter in policy.model.named_parameters():
        scale = max(1.0, float(gradients[name].abs().max()))
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-5 * scale, rtol=0, msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pack_without_images_gives_the_tower_zeros(folder: str, layout: RowLayout) -> None:
    """Not no gradient at all: another rank's tower waits in collectives for this one's."""
    policy, row = laid_out(folder, layout), row_of([], 9)
    policy.zero_grad()
    found = policy(join_rows([row])).logprobs
    found.sum().backward()
    torch.testing.assert_close(found, plain_forward(plain_model(folder), folder, row), atol=1e-5, rtol=0)
    of_tower = {name: one.grad for name, one in policy.named_parameters() if "visual" in name}
    assert of_tower
    assert all(gradient is not None and not gradient.any() for gradient in of_tower.values())


def test_a_pack_holds_each_image_once_and_in_order(policy: Policy) -> None:
    rows = mixed_rows()
    pack = join_rows(rows)
    assert len(pack.image_bytes) == len(RED) + len(BLUE) + len(NIGHT)
    assert pack.images == [list(row.images) for row in rows]
    assert join_rows([rows[2]]).images == []
    if torch.cuda.is_available():
        assert pack.to(torch.device("cuda")).image_bytes.device.type == "cpu"


def test_what_follows_a_sampled_place_is_masked(policy: Policy) -> None:
    """There is no image behind it: the row is still computed, and trained up to the place."""
    row = row_of([0], 6)
    segment = segment_of(row.ids[: row.targets[0]].tolist(), [30, policy.vision.image_token, 31, 32], [-1.0] * 4)
    made = make_row(0, segment, "", step=0, bound=0, model=vision_limits(), images=[RED])
    assert made.mask.tolist() == made.same_version.tolist() == [True, True, False, False]
    assert make_row(0, segment, "", step=0, bound=0, model=replace(vision_limits(), image_token=None)).mask.all()
    with torch.no_grad():
        found = policy(join_rows([made])).logprobs
        other = policy(join_rows([replace(made, ids=np.r_[made.ids[:-3], 40, 41, 42])])).logprobs
    assert torch.isfinite(found).all()
    assert found[0] == other[0]


def test_fewer_places_than_the_images_need_are_refused(policy: Policy) -> None:
    row = row_of([0], 6)
    with pytest.raises(ValueError, match="places for parts of images"):
        policy(join_rows([replace(row, images=(BLUE,))]))


def trajectory_of(images: EpisodeImages | None, count: int = 1) -> Trajectory:
    segment = segment_of(prompt_of([0]), [30, 31], [-1.0, -1.0])
    return Trajectory("train/0#0", "train/0", [segment] * count, 1.0, COMPLETED, images=images)


def test_a_step_reads_images_from_payload_and_files(policy: Policy, tmp_path: Path) -> None:
    file = tmp_path / "night.png"
    file.write_bytes(NIGHT)
    red, night = ref(RED).sha256, ref(NIGHT).sha256
    images = EpisodeImages([[red], [night]], {red: RED}, {night: file.as_uri()})
    batch = Batch(0, [["train/0#0"]])
    made = make_step_batch(batch, [0], [trajectory_of(images, 2)], 0, vision_limits())
    assert [row.images for row in made.rows] == [(RED,), (NIGHT,)]
    file.write_bytes(RED)
    for changed, model, message in (
        (images, vision_limits(), "another sha256"),
        (replace(images, urls={night: (tmp_path / "gone.png").as_uri()}), vision_limits(), "cannot be read"),
        (replace(images, data={red: BLUE}), vision_limits(), "another sha256|other bytes"),
        (images, replace(vision_limits(), image_token=None), "the trainer's model sees none"),
    ):
        with pytest.raises(UntrainableEpisodes, match=rf"episode train/0#0: .*({message})"):
            make_step_batch(batch, [0], [trajectory_of(changed, 2)], 0, model)


@pytest.mark.parametrize(("failures", "is_read"), [(images_module.READS - 1, True), (images_module.READS, False)])
def test_a_disk_that_fails_is_read_again(
    failures: int, is_read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, read_bytes, failed = tmp_path / "night.png", Path.read_bytes, list[Path]()
    file.write_bytes(NIGHT)

    def read(path: Path) -> bytes:
        if len(failed) < failures:
            failed.append(path)
            raise OSError(errno.EIO, "Input/output error")
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    monkeypatch.setattr(images_module, "READ_AGAIN", Backoff(0.0))
    night = ref(NIGHT).sha256
    images = EpisodeImages([[night]], {}, {night: file.as_uri()})
    if is_read:
        assert images_module.encoded_images(images) == [[NIGHT]]
    else:
        with pytest.raises(images_module.UnreadableImages, match="Input/output error"):
            images_module.encoded_images(images)


@pytest.mark.deep
async def test_engine_and_trainer_agree_before_and_after_an_update(folder: str, tmp_path: Path, ranks: Ranks) -> None:
    """Weights go back under the names that the engine takes; it samples with what the update made of the tower too."""
    engine = FSDPEngine(folder, TrainerConfig(lr=3e-3, eps=1e-4), ranks)
    asked = [(prompt_of([0]), [RED]), (prompt_of([2, 1]), [NIGHT, BLUE]), (prompt_of([]), [])]
    async with hf_engine(folder, tmp_path) as server:
        first = await sampled(server, asked)
        rows = [made_row(engine, n, *given, answer) for n, (given, answer) in enumerate(zip(asked, first, strict=True))]
        assert_agree(engine, rows)
        packs = pack_rows(number_tokens(rows), 4096, layout=engine.row_layout)
        update = engine.update(packs, lambda pack, outputs: -outputs.logprobs.sum(), 24.0, 0)
        assert update.grad_norm > 0
        manifest = WeightPublisher(tmp_path / "weights", "shm", keep=2).write(1, engine.weights(torch.float32))
        assert (await server.load_weights(manifest)).version == 1
        second = await sampled(server, asked)
    assert [answer.version_spans[0][0] for answer in second] == [1, 1, 1]
    assert max(abs(np.subtract(second[0].logprobs, first[0].logprobs))) > 0.01
    rows = [made_row(engine, n, *given, answer) for n, (given, answer) in enumerate(zip(asked, second, strict=True))]
    assert_agree(engine, rows)


async def sampled(server: Any, asked: Sequence[tuple[list[int], list[bytes]]]) -> list[Generation]:
    return list(await asyncio.gather(*(whole(server, ask_about(ids, *images, seed=5)) for ids, images in asked)))


def made_row(engine: FSDPEngine, number: int, prompt: list[int], images: list[bytes], answer: Generation) -> Row:
    segment = segment_of(prompt, answer.token_ids, answer.logprobs)
    return make_row(number, segment, "", step=0, bound=0, model=engine.limits, images=images)


def assert_agree(engine: FSDPEngine, rows: Sequence[Row]) -> None:
    for pack in pack_rows(number_tokens(rows), 4096, layout=engine.row_layout):
        (found,) = engine.score([pack])
        torch.testing.assert_close(found[pack.mask], pack.behaviour[pack.mask], atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"parallel": {"context": 2}}, "trainer.parallel.context"),
        ({"parallel": {"tensor": 2}}, "trainer.parallel.tensor"),
        ({"parallel": {"replicate": 2}}, "trainer.parallel.replicate"),
        ({"lora": {"rank": 4}}, "trainer.lora.rank"),
        ({"compile": True}, "trainer.compile"),
        ({"liger": True}, "trainer.liger"),
    ],
)
def test_what_is_not_exact_with_images_is_refused(folder: str, ranks: Ranks, settings: dict, key: str) -> None:
    with pytest.raises(BadJob, match=f"sees images, and {key} is not tried with them: set it to"):
        FSDPEngine(folder, TrainerConfig(**settings), ranks)


def test_routing_replay_is_refused(folder: str, ranks: Ranks) -> None:
    with pytest.raises(BadJob, match=r"rollout\.routing_replay: a model that sees images"):
        FSDPEngine(folder, TrainerConfig(), ranks, routing_replay=True)


def test_a_folder_without_a_processor_is_refused(folder: str, tmp_path: Path) -> None:
    plain_model(folder).save_pretrained(tmp_path)
    vision_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(BadJob, match=r"image processor cannot be made: .*preprocessor_config\.json"):
        load_policy(str(tmp_path), 1.0)


@pytest.mark.deep
def test_a_final_model_has_its_processor(folder: str, tmp_path: Path, ranks: Ranks) -> None:
    from penstock.trainer.export import save_final_model

    save_final_model(FSDPEngine(folder, TrainerConfig(), ranks), ranks, folder, tmp_path / "final")
    assert load_policy(str(tmp_path / "final"), 1.0).vision is not None


@pytest.mark.deep
def test_two_ranks_make_the_update_of_one(folder: str, tmp_path: Path) -> None:
    """A rank without images, and one without rows, go through the tower's collectives like the other."""
    for ranks in (1, 2):
        out = tmp_path / str(ranks)
        out.mkdir()
        run_ranks("seeing_ranks.py", ranks, out, folder)
    (one, two) = (json.loads((tmp_path / ranks / "update.json").read_text()) for ranks in "12")
    assert two == pytest.approx(one, rel=1e-5)
    expected, found = (load_file(tmp_path / ranks / "updated.safetensors") for ranks in "12")
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-5, msg=name)
