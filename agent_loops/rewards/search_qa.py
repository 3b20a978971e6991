"""Question answering with search: exact match and F1 of the last ``<answer>``, normalised as Search-R1 does.

Jin et al. 2025, "Search-R1" (arXiv:2503.09516), section 3.4 (exact match); normalisation and F1: Rajpurkar et al. 2016,
"SQuAD" (arXiv:1606.05250), section 6.1.

    F1 = 2 · P · R / (P + R)     P, R: share of the answer's and of the reference's words that the other one has
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping
from typing import Any


def exact_match(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float:
    """1 if the answer equals one of the references. Raises `ValueError` if there are no references."""
    answer, references = _answer(solution_str, extra_info), targets_of(ground_truth)
    if answer is None or normalised(answer) not in {normalised(reference) for reference in references}:
        return 0.0
    return 0.25 if _guesses(solution_str) else 1.0


def f1(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> float:
    """The best F1 over the references, 0 … 1. Raises `ValueError` if there are no references."""
    answer, references = _answer(solution_str, extra_info), targets_of(ground_truth)
    if answer is None:
        return 0.0
    best = max(word_f1(answer, reference) for reference in references)
    return best / 4 if _guesses(solution_str) else best


def normalised(text: str) -> str:
    """Lower case; punctuation, articles and repeated white space left out."""
    words = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", words).split())


def word_f1(answer: str, reference: str) -> float:
    words, expected = normalised(answer).split(), normalised(reference).split()
    if not words or not expected:
        return float(words == expected)
    common = sum((Counter(words) & Counter(expected)).values())
    return 2 * common / (len(words) + len(expected))


def targets_of(ground_truth: Any) -> list[str]:
    """References of a row: verl's ``{"target": text or list}``, a text, or a list."""
    targets = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    texts = [targets] if isinstance(targets, str) else list(targets or ())
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"the ground truth {ground_truth!r} has no text, and no list of texts under 'target'")
    return texts


def _answer(solution: str, extra_info: Mapping[str, Any] | None) -> str | None:
    """Returns the argument of the tool `final_answer`, else the content of the last tags."""
    final = (extra_info or {}).get("final_answer")
    if isinstance(final, str):
        return final
    tagged = re.findall(r"<answer>(.*?)</answer>", solution, re.DOTALL)
    return tagged[-1].strip() if tagged else None


def _guesses(solution: str) -> bool:
    """Returns whether there are more than ten answers: the score is then a quarter, as in verl."""
    return max(solution.count("<answer>"), solution.count("</answer>")) > 10
