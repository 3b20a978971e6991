"""Files for people and programs: cut lines, rewinding, evaluations, readable runs of tokens."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from trainer_support import make_trajectory
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from penstock.common import append_jsonl, read_jsonl
from penstock.trainer import Recorder, Stopping, readable_trajectory
from penstock.trainer.config import StopConfig
from penstock.trainer.state.recorder import kept_of, mask_runs, token_ends

pytestmark = pytest.mark.torch


def test_a_rewind_forgets_later_steps_and_cut_lines(tmp_path: Path, tiny_model: str) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps({"step": n, "version": n + 1}) + "\n" for n in range(5)) + '{"step": 5, "ver')
    (tmp_path / "eval.jsonl").write_text('{"version": 2}\n{"version": 4}\n')
    recorder = Recorder(tmp_path, tiny_model, save_trajectories=1, stopping=Stopping(StopConfig()))
    recorder.rewind(3)
    assert [line["step"] for line in read_jsonl(metrics)] == [0, 1, 2]
    assert [line["version"] for line in read_jsonl(tmp_path / "eval.jsonl")] == [2]
    recorder.evaluation(2, {"reward": 0.5}, wall_s=1.0)
    assert read_jsonl(metrics)[1] == {"step": 1, "version": 2, "eval/reward": 0.5}
    recorder.close()


def test_an_evaluation_holds_no_list_of_steps(tmp_path: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor a restart: both go through the file, which has a line for each step."""

    class Alive(dict[str, Any]):
        now = most = 0

        def __init__(self, plain: dict[str, Any]) -> None:
            super().__init__(plain)
            Alive.now += 1
            Alive.most = max(Alive.most, Alive.now)

        def __del__(self) -> None:
            Alive.now -= 1

    recorder = Recorder(tmp_path, tiny_model, save_trajectories=1, stopping=Stopping(StopConfig()))
    for name in ("metrics.jsonl", "steps.jsonl"):
        append_jsonl(tmp_path / name, [{"step": step, "version": step + 1, "episodes": []} for step in range(500)])
    parse = json.loads
    monkeypatch.setattr(json, "loads", lambda text: Alive(parse(text)))
    recorder.evaluation(7, {"reward": 0.5}, wall_s=1.0)
    recorder.rewind(400)
    recorder.close()
    assert 1 <= Alive.most <= 4


def test_runs_of_a_mask() -> None:
    assert mask_runs(np.array([1, 1, 0, 1])) == [(0, 2), (2, 3), (3, 4)]
    assert mask_runs(np.array([0])) == [(0, 1)]
    assert mask_runs(np.array([])) == []


def test_a_readable_trajectory_has_every_token_once() -> None:
    trajectory = make_trajectory("train/0", 0, 3)
    line = json.loads(json.dumps(readable_trajectory(trajectory, 0.5, None)))
    (segment,) = line["segments"]
    ids = [token for run in segment["runs"] for token in run["text"]]
    assert ids == trajectory.segments[0].response_ids.tolist()
    sampled = [run for run in segment["runs"] if run["mask"]]
    assert [run["versions"] for run in sampled] == [[[3, run["tokens"]]] for run in sampled]
    assert line["advantage"] == 0.5
    assert line["outcome"]["kind"] == "completed"


def test_recorder_keeps_best_worst_and_sample() -> None:
    rewards = [0.0] * 60 + [1.0, -1.0, 0.5, None]
    kept = kept_of(rewards, 8)
    assert len(kept) == 8
    assert {60, 61} <= set(kept)
    assert kept_of(rewards, 1) == [60]
    assert kept_of(rewards[:3], 8) == [0, 1, 2]
    assert kept_of(rewards, 0) == []


# how far each token reaches in the text -------------------------------------------------------------------------------
MODEL = str(Path(__file__).parents[3] / "recipes" / "calculator" / "model")


def cut(text: str, ends: list[int]) -> list[str]:
    assert ends == sorted(ends)
    assert ends[-1] == len(text)
    return [text[start:end] for start, end in pairwise([0, *ends])]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def blank_tokenizer() -> PreTrainedTokenizerFast:
    """A decoder that drops the blank in front of the first word: a word alone is not a word in a row."""
    tokenizer = Tokenizer(models.WordLevel({"▁the": 0, "▁cat": 1, "s": 2}, unk_token="s"))
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_a_real_tokenizer() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = tokenizer.encode('<tool_call>\n{"code": "12+30"}\n</tool_call><|im_end|>', add_special_tokens=False)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    pieces = cut(text, token_ends(ids, text, tokenizer))
    assert pieces == [tokenizer.decode([number], skip_special_tokens=False) for number in ids]


def test_a_character_of_several_tokens_counts_with_the_last() -> None:
    tokenizer = byte_tokenizer()
    text = "aé𝄞b"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert cut(text, token_ends(ids, text, tokenizer)) == ["a", "", "é", "", "", "", "𝄞", "b"]


def test_bytes_that_are_no_character_take_no_time_and_lose_nothing() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("é", add_special_tokens=False)[:1] * 2000 + tokenizer.encode("ok", add_special_tokens=False)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert cut(text, token_ends(ids, text, tokenizer))[-1] == "k"


def test_blanks_are_where_the_decoder_puts_them() -> None:
    tokenizer = blank_tokenizer()
    text = tokenizer.decode([0, 1, 2, 0], skip_special_tokens=False)
    assert text == "the cats the"
    assert cut(text, token_ends([0, 1, 2, 0], text, tokenizer)) == ["the", " cat", "s", " the"]


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), blank_tokenizer()])
def test_nothing_has_no_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    assert token_ends([], "", tokenizer) == []
