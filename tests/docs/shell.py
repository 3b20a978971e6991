"""Shell text as simple commands, each a list of words."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

LEADING = {"then", "do", "else", "if", "while", "until", "!", "time", "sudo", "nohup", "exec", "{"}
CLOSING = {"fi", "done", "}", "esac"}
ASSIGNMENT = re.compile(r"^\w+=")


def simple_commands(text: str) -> Iterator[list[str]]:
    """Comments, redirections, leading assignments and here-documents are left out."""
    lines = iter(re.sub(r"\\\n\s*", " ", text).splitlines())
    for line in lines:
        yield from filter(None, map(_bare, _split(line)))
        for marker in re.findall(r"<<-?\s*['\"]?(\w+)", line):
            while next(lines, marker).strip() != marker:
                continue


def _split(line: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    tokens = iter(lexer)
    for token in tokens:
        if token[0] in "<>":
            if words and words[-1].isdigit():
                words.pop()  # of `2>file`
            next(tokens, None)
        elif set(token) <= set(";&|()"):
            yield words
            words = []
        else:
            words.append(token)
    yield words


def _bare(words: list[str]) -> list[str]:
    while words and (words[0] in LEADING or ASSIGNMENT.match(words[0])):
        words = words[1:]
    return [] if words and (words[0] in CLOSING or words[0] == "for") else words
