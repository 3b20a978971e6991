from __future__ import annotations

import math

import numpy as np
import pytest

from penstock.agent_loops import InfraFailure, TokenMismatch
from penstock.agent_loops.llm import check_generation
from penstock.rollout_server import Generation

GOOD = {"token_ids": [5, 6], "logprobs": [-0.1, 0.0], "version_spans": [(4, 0, 1), (5, 1, 2)], "finish_reason": "stop"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": []}, "no tokens"),
        ({"logprobs": [-0.1]}, "2 token ids but 1 logprobs"),
        ({"logprobs": [-0.1, math.nan]}, "nan"),
        ({"logprobs": [math.nan, -0.1]}, "nan"),
        ({"logprobs": [math.inf, -math.inf]}, "inf"),
        ({"logprobs": [-0.1, 0.2]}, "not a finite number below 0"),
        ({"logprobs": [-math.inf, -0.1]}, "inf"),
        ({"version_spans": []}, "do not cover 2 tokens"),
        ({"version_spans": [(4, 0, 1)]}, "do not cover"),
        ({"version_spans": [(4, 0, 0), (4, 0, 2)]}, "do not cover"),
        ({"version_spans": [(4, 0, 2), (5, 1, 2)]}, "do not cover"),
        ({"version_spans": [(4, 0, 1), (3, 1, 2)]}, "version 3, below the episode's floor 4"),
        ({"routed_experts": np.zeros((1, 2, 2))}, r"2 token ids but routed experts of shape \(1, 2, 2\)"),
        ({"routed_experts": np.zeros((2, 2))}, r"2 token ids but routed experts of shape \(2, 2\)"),
    ],
)
def test_answers_that_do_not_fit_together_are_refused(change, message):
    check_generation(Generation(**GOOD), min_version=4)
    check_generation(Generation(**GOOD, routed_experts=np.zeros((2, 2, 2), dtype=np.uint8)), min_version=4)
    with pytest.raises(TokenMismatch, match=message):
        check_generation(Generation(**{**GOOD, **change}), min_version=4)


def test_an_aborted_call_is_no_answer():
    with pytest.raises(InfraFailure, match="aborted"):
        check_generation(Generation(**{**GOOD, "finish_reason": "abort"}), 0)
