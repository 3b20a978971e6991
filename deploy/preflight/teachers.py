"""Checks of teachers: is each reached, does it have the model's vocabulary, does it give logprobs of prompts and as
many likeliest ids as are asked for, and what do these cost in bytes?"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.deploy.config import RunConfig
from penstock.deploy.preflight.check import Check, human, warning
from penstock.deploy.preflight.data import data_sources
from penstock.deploy.preflight.routing import token_bytes
from penstock.transfer_queue import MAX_PAYLOAD_BYTES

if TYPE_CHECKING:
    from penstock.agent_loops import TeacherConfig

NAME = "agent.teachers"


def check_teachers(config: RunConfig) -> Iterator[Check]:
    teachers, learns = config.agent.teachers, config.trainer.distill.enabled
    if not teachers and not learns:
        return
    if not teachers:
        detail, fix = "none, and trainer.distill is on", "name a teacher per data source, or set trainer.distill to 0"
        yield Check(NAME, False, detail, fix)
        return
    if not learns:
        fix = "set trainer.distill.in_advantage or trainer.distill.in_loss, or remove agent.teachers"
        yield warning(NAME, "episodes are judged, and nothing is learned from it", fix)
    yield from _sources(config)
    yield from _payloads(config)
    for pattern, teacher in teachers.items():
        yield _check_teacher(config, pattern, teacher)


def _sources(config: RunConfig) -> Iterator[Check]:
    """Rows without a teacher learn from their reward alone."""
    from penstock.agent_loops import Teachers

    known = Teachers(config.agent.teachers)
    untaught = sorted({source for source in data_sources(config) if known.of(source) is None})
    if not untaught:
        return
    detail = f"no teacher for data_source {', '.join(untaught)}"
    fix = "add them to agent.teachers; `*` stands for all others"
    if config.trainer.distill.reward_weight == 0:
        yield Check(NAME, False, f"{detail}, and trainer.distill.reward_weight is 0: they would teach nothing", fix)
    else:
        yield warning(NAME, detail, fix)


def _payloads(config: RunConfig) -> Iterator[Check]:
    """Yield the cost of the likeliest ids, if a teacher gives them. `check_capacity` and `check_memory` count them
    too."""
    if not any(config.agent.teacher_top_k):
        return
    most, size = max(config.agent.teacher_top_k), config.agent.max_response_tokens * token_bytes(config)
    detail = f"top_k {most}: {token_bytes(config)} bytes per sampled token, up to {human(size)} per episode"
    if size > MAX_PAYLOAD_BYTES:
        fix = "lower agent.teachers.*.top_k or agent.max_response_tokens"
        yield Check(NAME, False, f"{detail}; the queue takes {human(MAX_PAYLOAD_BYTES)}", fix)
    else:
        yield Check(NAME, True, detail)


def _check_teacher(config: RunConfig, pattern: str, teacher: TeacherConfig) -> Check:
    from penstock.agent_loops import AgentError, BadTeacher
    from penstock.agent_loops.chat import chat_of

    name = f"{NAME}.{pattern}"
    if not Path(config.model).is_dir():
        return warning(
            name, f"{teacher.url}: not asked, {config.model} is not a folder here", "it is asked when tokens come"
        )
    try:
        tokenizer = chat_of(config.model, config.agent).tokenizer
    except (AgentError, OSError, ValueError):
        return warning(
            name, f"{teacher.url}: not asked, the model has no usable tokenizer", "see the model's own check"
        )
    try:
        return Check(name, True, asyncio.run(_ask(teacher, tokenizer, config.rollout.max_model_len)))
    except BadTeacher as error:
        return Check(name, False, str(error), error.fix)


async def _ask(config: TeacherConfig, tokenizer: Any, longest: int) -> str:
    """Raises `BadTeacher`."""
    from penstock.agent_loops import PROBE, Teacher

    encoded = tokenizer(PROBE, add_special_tokens=False)["input_ids"]
    highest = max(tokenizer.get_vocab().values())
    teacher = Teacher(config)
    try:
        return await teacher.check(encoded, highest, longest)
    finally:
        await teacher.close()
