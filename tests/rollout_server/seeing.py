"""Requests with images for the tiny Qwen2.5-VL, and the same model without any engine."""

from __future__ import annotations

import base64
import hashlib
import io
from pathlib import Path
from typing import Any

from tests.vision_model import png, vision_tokenizer

from penstock.agent_loops import AgentConfig
from penstock.agent_loops.chat import chat_of
from penstock.rollout_server import GenerateRequest, ImageRef, Sampling
from penstock.weight_sync import Manifest

RED, GREEN, BLUE = png((200, 30, 30)), png((20, 220, 20)), png((20, 20, 220), (300, 120))
"""Of 6, 6 and 12 tokens."""


def ref(data: bytes) -> ImageRef:
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return ImageRef(sha256=hashlib.sha256(data).hexdigest(), url=url)


def context(*tokens: int) -> list[int]:
    """A prompt with one image per number, which is how many tokens it has."""
    text = "".join(f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>" for count in tokens)
    ids: list[int] = vision_tokenizer().encode(f"<|im_start|>user\n{text}What colour?<|im_end|>\n")
    return ids


def as_a_loop_asks(folder: str, image: bytes) -> list[int]:
    """The ids that an agent's chat makes of it for this very model."""
    parts = [{"type": "image", "image": ref(image).url}, {"type": "text", "text": "What colour?"}]
    segment = chat_of(folder, AgentConfig()).start([{"role": "user", "content": parts}])
    assert segment.images == [ref(image)]
    return segment.context()


def ask_about(ids: list[int], *images: bytes, count: int = 8, **sampling: Any) -> GenerateRequest:
    refs = tuple(ref(data) for data in images)
    return GenerateRequest(token_ids=ids, images=refs, sampling=Sampling(max_new_tokens=count, **sampling))


def bomb() -> bytes:
    """Few bytes, more pixels than Pillow opens: its error for that is an error of its own kind."""
    from PIL import Image

    written = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(written, "png")
    return written.getvalue()


class SeeingReference:
    """Plain forward passes over pixels of transformers' own processor; other weights, under the names of the files."""

    def __init__(self, folder: str, directory: Path) -> None:
        import torch
        from safetensors.torch import load_file
        from transformers import AutoImageProcessor, AutoModelForImageTextToText

        from penstock.weight_sync import HubNames, WeightPublisher

        self.torch = torch
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self.processor = AutoImageProcessor.from_pretrained(folder)
        self.first: dict[str, Any] = load_file(Path(folder) / "model.safetensors")
        self._names = HubNames.of(self.model, self.first)
        self.publisher = WeightPublisher(directory, "shm", keep=8, full_every=100)
        self.published: list[Manifest] = []

    def use(self, tensors: dict[str, Any]) -> None:
        mine = self._names.joined(tensors)
        with self.torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(mine[name])

    def other(self, seed: int, part: str = "") -> dict[str, Any]:
        """Weights unlike the first ones; of another `part` the first ones."""
        generator = self.torch.Generator().manual_seed(seed)
        changed = {
            name: tensor + 0.05 * self.torch.randn(tensor.shape, generator=generator)
            for name, tensor in self.first.items()
        }
        return {name: tensor if part in name else self.first[name] for name, tensor in changed.items()}

    def publish(self, version: int, tensors: dict[str, Any]) -> Manifest:
        self.published.append(self.publisher.write(version, tensors.items()))
        return self.published[-1]

    def tokens(self, image: bytes) -> int:
        """Ids that stand for it."""
        from PIL import Image

        grid = self.processor([Image.open(io.BytesIO(image)).convert("RGB")], return_tensors="pt")["image_grid_thw"]
        return int(grid.prod()) // self.processor.merge_size**2

    def logprobs(self, ids: list[int], images: list[bytes], sampled: list[int]) -> list[float]:
        """One pass over everything, pixels with it, without a cache."""
        from PIL import Image

        every = self.torch.tensor([ids + sampled])
        seen: dict[str, Any] = {}
        if images:
            opened = [Image.open(io.BytesIO(data)).convert("RGB") for data in images]
            seen = dict(self.processor(opened, return_tensors="pt"))
            seen["mm_token_type_ids"] = (every == self.model.config.image_token_id).int()
        with self.torch.no_grad():
            scores = self.model(every, **seen).logits[0, len(ids) - 1 : -1].float().log_softmax(-1)
        return scores.gather(1, self.torch.tensor(sampled).unsqueeze(1)).squeeze(1).tolist()
