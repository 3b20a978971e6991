"""The exceptions of agent workers.

AgentError
├── TemplateError     the model's chat template cannot carry this conversation exactly
├── LoadError         a name or path in the recipe cannot be resolved
├── InfraFailure      machinery failed: the episode ends as infra_error(component), never with a reward of 0
│   ├── BadOutput         a loop returned what no trajectory can hold
│   ├── NoReward          the policy or the recipe prevented a reward; 0 once the run had one of that data source
│   └── TokenMismatch     ids, logprobs or versions do not fit together (invariant 1); counted
├── EpisodeRestart    internal: the journal cannot be followed, the episode starts afresh
└── WorkerStopped     the worker cannot make progress; the message says why
"""

from __future__ import annotations


class AgentError(Exception):
    """Base of what agent_loops raises."""


class TemplateError(AgentError):
    """The chat template is missing, ignores tools, or cannot be continued on verbatim ids; the message says which."""


class LoadError(AgentError):
    """A loop, tool or reward named in a recipe or dataset row could not be loaded; the message names it."""


class InfraFailure(AgentError):
    """Infrastructure failed. `component` names the part (``rollout``, ``reward``, ``loop`` …)."""

    def __init__(self, component: str, reason: str) -> None:
        super().__init__(f"{component}: {reason}")
        self.component = component
        self.reason = reason


class NoReward(InfraFailure):
    """The episode has no reward, and either the policy or the recipe is the reason."""


class BadOutput(InfraFailure):
    """A loop returned a value that no trajectory can hold: the episode's outcome names the file and line of its run."""


class TokenMismatch(InfraFailure):
    """The engine or a loop returned other tokens than those that were sampled."""


class EpisodeRestart(AgentError):
    """The replay left the journal's path: run the episode again with an empty journal."""


class WorkerStopped(AgentError):
    """Infrastructure failed too often in a row, or no rollout server came; ends the worker process."""
