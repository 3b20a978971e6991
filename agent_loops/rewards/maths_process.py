"""``python -m penstock.agent_loops.rewards.maths_process CPU_S MEMORY_MB``: see `maths`. Ends with its input."""

from __future__ import annotations

import json
import logging
import resource
import sys
from functools import lru_cache
from typing import Any


def main() -> None:
    cpu_s, memory_mb = (int(argument) for argument in sys.argv[1:])
    import math_verify  # noqa: F401 - before the limits: what it takes is not the first answer's

    logging.disable(logging.CRITICAL)  # the library warns about its switched-off time limits, and of every odd answer
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    out = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        # The kernel sends SIGXCPU when this many more seconds are used, also in the middle of one long multiplication.
        used = resource.getrusage(resource.RUSAGE_SELF)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + cpu_s, hard))
        out.write(json.dumps(_answer(json.loads(line))) + "\n")
        out.flush()


def _answer(question: dict[str, str]) -> dict[str, Any]:
    reference = _reference(question["reference"])
    if not reference:
        return {"bad_reference": True}
    try:
        return _compare(list(reference), question["solution"])
    except MemoryError:
        return {"too_costly": True}


def _compare(reference: list[Any], solution: str) -> dict[str, Any]:
    import math_verify

    answer = math_verify.parse(solution, parsing_timeout=None)
    if not answer:
        return {"unreadable": True}
    return {"equal": bool(math_verify.verify(reference, answer, timeout_seconds=None))}


@lru_cache(maxsize=1024)
def _reference(text: str) -> tuple[Any, ...]:
    import math_verify

    boxed = text if "\\boxed" in text or "$" in text else f"\\boxed{{{text}}}"
    return tuple(math_verify.parse(boxed, parsing_timeout=None))


if __name__ == "__main__":
    main()
