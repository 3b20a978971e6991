"""A tiny random Qwen2.5-VL with its processor, from transformers' own classes; nothing is downloaded."""

from __future__ import annotations

import io
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

TEMPLATE = Path(__file__).parent / "agent_loops" / "templates" / "qwen_vl.jinja"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
VIDEO = "<|video_pad|>"
TEXT = ["What is 12+34? Look at the picture and say its colour. user assistant system tool_call tool_response red blue"]
VOCABULARY = 400


@lru_cache
def vision_tokenizer(**settings: Any) -> Any:
    """Byte-level BPE with Qwen-VL's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[*SPECIAL, VIDEO], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXT * 20, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", chat_template=TEMPLATE.read_text(), **settings
    )


def save_vision_processor(folder: Path) -> str:
    """Tokenizer and image processor: 14 pixels a patch, 2 x 2 patches a token, 4 to 16 tokens an image."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    vision_tokenizer().save_pretrained(folder)
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": 4 * 28 * 28, "longest_edge": 16 * 28 * 28})
    settings = {**processor.to_dict(), "processor_class": "Qwen2_5_VLProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return str(folder)


VISION_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def text_sizes() -> dict[str, int]:
    return {
        "vocab_size": len(vision_tokenizer()),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    }


def token_ids() -> dict[str, int]:
    token = vision_tokenizer().convert_tokens_to_ids
    return {
        "image_token_id": token("<|image_pad|>"),
        "video_token_id": token(VIDEO),
        "vision_start_token_id": token("<|vision_start|>"),
        "vision_end_token_id": token("<|vision_end|>"),
    }


def save_vision_model(folder: Path) -> str:
    """With weights: two layers of text, one of vision."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(
        text_config={
            **text_sizes(),
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
        },
        vision_config={
            "depth": 1,
            **VISION_SIZES,
            "window_size": 112,
            "fullatt_block_indexes": [0],
        },
        **token_ids(),
        tie_word_embeddings=False,
    )
    model = Qwen2_5_VLForConditionalGeneration(config).eval()
    for parameter in model.parameters():  # far enough from each other that another image is another answer
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return save_vision_processor(folder)


def save_qwen3_vl(folder: Path) -> str:
    """A tiny random Qwen3-VL with the same tokenizer and processor: two layers of text, two of vision."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    torch.manual_seed(0)
    config = Qwen3VLConfig(
        text_config={
            **text_sizes(),
            "head_dim": 8,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0},
        },
        vision_config={
            "depth": 2,
            **VISION_SIZES,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        **token_ids(),
    )
    model = Qwen3VLForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return save_vision_processor(folder)


def png(colour: tuple[int, int, int], size: tuple[int, int] = (60, 90)) -> bytes:
    """An image of one colour."""
    from PIL import Image

    data = io.BytesIO()
    Image.new("RGB", size, colour).save(data, "PNG")
    return data.getvalue()
