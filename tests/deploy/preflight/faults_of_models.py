"""Model folders and chat templates."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tests.deploy.preflight.planting import Place, planted
from tests.tiny_model import save_tiny_model

from penstock.deploy.preflight.agent import check_template
from penstock.deploy.preflight.model import check_context, check_model, check_vocabulary
from penstock.deploy.preflight.settings import check_packing


@planted(check_model, "model", r"config\.json, tokenizer")
def a_folder_that_is_not_there(place: Place) -> Sequence[str]:
    return ["model=./no/such/model"]


@planted(check_model, "model", r"download the model again")
def a_shard_that_was_not_downloaded(place: Place) -> Sequence[str]:
    model = place.model()
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    names = {"model.norm.weight": 1, "model.embed_tokens.weight": 2}
    index = {"weight_map": {name: f"model-0000{shard}-of-00002.safetensors" for name, shard in names.items()}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    return [f"model={model}"]


@planted(check_model, "model", r"download the model again")
def a_download_that_was_cut_short(place: Place) -> Sequence[str]:
    model = place.model()
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1_000_000])
    return [f"model={model}"]


@planted(check_model, "model", r"git lfs pull")
def a_clone_without_lfs(place: Place) -> Sequence[str]:
    model = place.model()
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4829816\n"
    (model / "model.safetensors").write_text(pointer)
    return [f"model={model}"]


@planted(check_model, "model", r"save_pretrained")
def a_folder_without_its_tokenizer(place: Place) -> Sequence[str]:
    model = place.model()
    (model / "tokenizer_config.json").unlink()
    return [f"model={model}"]


@planted(check_vocabulary, "vocabulary", r"resize_token_embeddings")
def tokens_added_without_rows_for_them(place: Place) -> Sequence[str]:
    model = place.model()
    told = json.loads((model / "tokenizer.json").read_text())
    added = {**told["added_tokens"][0], "id": 515, "content": "<|new|>"}
    told["added_tokens"].append(added)
    (model / "tokenizer.json").write_text(json.dumps(told))
    return [f"model={model}"]


@planted(check_context, "context length", r"rollout\.max_model_len to 1024 or less")
def a_context_beyond_the_models(place: Place) -> Sequence[str]:
    return ["rollout.engine=vllm", "rollout.max_model_len=4096"]


@planted(check_template, "chat template", r"chat_template\.jinja")
def a_model_without_a_chat_template(place: Place) -> Sequence[str]:
    model = place.model()
    (model / "chat_template.jinja").unlink()
    return [f"model={model}"]


@planted(check_template, "chat template", r"ignores tools")
def a_template_that_shows_no_tools(place: Place) -> Sequence[str]:
    model = place.model()
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return [f"model={model}"]


@planted(check_template, "chat template", r"asks in line 1 for .*'nothing'")
def a_template_with_an_error_in_it(place: Place) -> Sequence[str]:
    model = place.model()
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role.nothing.here }}{% endfor %}")
    return [f"model={model}"]


@planted(check_packing, "packed training", r"another model")
def a_model_that_cannot_be_trained(place: Place) -> Sequence[str]:
    from safetensors.torch import load_file, save_file

    model = save_tiny_model(place.folder)
    tensors = load_file(place.folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, place.folder / "model.safetensors", metadata={"format": "pt"})
    return [f"model={model}"]
