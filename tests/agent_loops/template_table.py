"""Which chat templates are accepted exactly with tools, and by which parser.

    python -m tests.agent_loops.template_table FOLDER|FILE…

One line per template, then how many. Accepted: `agent.parser: auto` finds the only parser that reads the calls that
the template writes or asks for, and `verify_template` proves that splicing writes what the template writes, or that a
new segment can begin before results. The tokenizer is a small one with the template's special tokens
(`families.tokenizer_of`); templates without tools are left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.agent_loops.families import tokenizer_of

from penstock.agent_loops import ChatTokens, TemplateError
from penstock.agent_loops.chat import name_of, verify_template
from penstock.agent_loops.chat.calls import choose_parser
from penstock.agent_loops.chat.template import ChatTemplate

PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string", "description": "What to compute."}}}
TOOLS = [{"type": "function", "function": {"name": "calculator", "description": "Adds.", "parameters": PARAMETERS}}]

ENDS = ("<|END_OF_TURN_TOKEN|>", "<|end_of_msg|>", "<|assistant_end|>", "<|eot_id|>")
"""Ends of text of tokenizers whose templates do not say `eos_token`."""


@dataclass(frozen=True)
class Verdict:
    file: Path
    parser: str
    """Empty: refused."""
    reason: str
    """Of the refusal, else what the template rewrites and refuses."""
    renews: bool = False
    """A new segment begins before results."""

    def line(self) -> str:
        name = f"{self.file.parent.name}/{self.file.name}"
        return f"{name}: {self.parser or 'refused'}: {self.reason}"


def auto_chat(file: Path, eos: str | None = None) -> ChatTokens:
    """As a worker makes it without a setting. Raises `TemplateError`."""
    text = file.read_text()
    eos = eos or next((word for word in ENDS if word in text), "</s>" if "eos_token" in text else None)
    tokenizer = tokenizer_of(file, eos)
    return ChatTokens(tokenizer, choose_parser("auto", ChatTemplate(tokenizer)))


def judge(file: Path, tools: Sequence[Any] = TOOLS) -> Verdict:
    try:
        chat = auto_chat(file)
        found = verify_template(chat, tools)
        told = found.summary(chat.thinking_history)
        return Verdict(file, name_of(chat.parser), told, "tool" in found.renewing)
    except TemplateError as refusal:
        return Verdict(file, "", str(refusal))


def templates_in(paths: Sequence[Path]) -> Iterator[Path]:
    """Those that know of tools."""
    for path in paths:
        for file in sorted(path.rglob("*.jinja")) if path.is_dir() else [path]:
            if "tools" in file.read_text():
                yield file


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.agent_loops.template_table", description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path, help="Folders of *.jinja files, or files.")
    verdicts = []
    for file in templates_in(parser.parse_args(arguments).paths):
        verdicts.append(judge(file))
        print(verdicts[-1].line(), flush=True)
    accepted, renewing = sum(bool(one.parser) for one in verdicts), sum(one.renews for one in verdicts)
    print(
        f"{accepted} of {len(verdicts)} templates with tools are accepted exactly, {renewing} of them with a new "
        f"segment before results; {len(verdicts) - accepted} are refused"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
