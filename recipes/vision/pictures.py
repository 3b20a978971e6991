"""Pictures with a question that only the picture answers: a colour, a count, a chart. Drawn from a seed.

56 by 56 pixels: 2 by 2 tokens of the recipe's model, each of 28 by 28 pixels.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from PIL import Image, ImageDraw

SIDE = 56
CELL = 28
COLOURS: Mapping[str, tuple[int, int, int]] = {
    "red": (210, 50, 50),
    "green": (50, 170, 60),
    "blue": (50, 80, 210),
    "yellow": (225, 205, 50),
    "purple": (150, 60, 190),
    "cyan": (60, 190, 200),
}
NUMBERS = ("one", "two", "three", "four")
ANSWERS: Mapping[str, tuple[str, ...]] = {"colour": tuple(COLOURS), "count": NUMBERS, "chart": tuple(COLOURS)}
"""Possible answers, by kind."""
WORDS = (*COLOURS, *NUMBERS)
QUESTIONS: Mapping[str, str] = {
    "colour": "Which colour is the square?",
    "count": "How many squares are there?",
    "chart": "Which colour is the highest bar?",
}


@dataclass(frozen=True, slots=True)
class Picture:
    """An image, the kind of question about it, and the right answer."""

    kind: str
    """A key of `QUESTIONS`"""
    png: bytes
    answer: str


def picture(dice: Random) -> Picture:
    """Kind and answer are drawn evenly, then an image that shows the answer."""
    kind = dice.choice(list(QUESTIONS))
    answer = dice.choice(ANSWERS[kind])
    image = Image.new("RGB", (SIDE, SIDE), _shade((235, 235, 235), dice))
    DRAWN[kind](ImageDraw.Draw(image), answer, dice)
    written = io.BytesIO()
    image.save(written, "PNG")
    return Picture(kind, written.getvalue(), answer)


def _colour(canvas: ImageDraw.ImageDraw, answer: str, dice: Random) -> None:
    size = dice.randint(28, 40)
    left, top = (dice.randint(2, SIDE - size - 2) for _ in range(2))
    _fill(canvas, (left, top, size, size), _shade(COLOURS[answer], dice))


def _count(canvas: ImageDraw.ImageDraw, answer: str, dice: Random) -> None:
    """At most one in a cell, so that none hides another."""
    for cell in dice.sample(range(4), NUMBERS.index(answer) + 1):
        size = dice.randint(20, 22)
        left, top = (at * CELL + dice.randint(2, CELL - size - 2) for at in (cell % 2, cell // 2))
        _fill(canvas, (left, top, size, size), _shade((35, 35, 35), dice))


def _chart(canvas: ImageDraw.ImageDraw, answer: str, dice: Random) -> None:
    """Two bars of two colours, one at least twice as high as the other."""
    other = dice.choice([colour for colour in COLOURS if colour != answer])
    bars = [(answer, dice.randint(38, 50)), (other, dice.randint(8, 19))]
    dice.shuffle(bars)
    for place, (colour, height) in enumerate(bars):
        _fill(canvas, (place * CELL + 4, SIDE - 2 - height, 20, height), _shade(COLOURS[colour], dice))


DRAWN: Mapping[str, Callable[[ImageDraw.ImageDraw, str, Random], None]] = {
    "colour": _colour,
    "count": _count,
    "chart": _chart,
}


def _fill(canvas: ImageDraw.ImageDraw, box: tuple[int, int, int, int], colour: tuple[int, int, int]) -> None:
    """`box`: left, top, width, height."""
    left, top, width, height = box
    canvas.rectangle((left, top, left + width - 1, top + height - 1), fill=colour)


def _shade(colour: tuple[int, int, int], dice: Random) -> tuple[int, int, int]:
    red, green, blue = (min(255, max(0, part + dice.randint(-15, 15))) for part in colour)
    return red, green, blue
