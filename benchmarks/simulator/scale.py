"""Arithmetic from one GPU to thousands: a planned cluster, its step, what its queue carries, how long weights travel.

Steps, and with them the queue's load, rest on `PLAN_INPUTS`, which nothing here has measured; weights on `MEASURED`.

python -m benchmarks.simulator.scale        the tables of docs/how/scale.md
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from benchmarks.simulator.hardware import MACHINES, MODELS, Model, gradient_exchange_s, token_s, token_s_per_sequence
from benchmarks.simulator.mixtures import layout_table
from benchmarks.simulator.rates import MEASURED, MEASURED_AT, PAUSE_P50_S, PAUSE_P99_S, PAUSED_MB, PLAN_INPUTS, planned
from penstock.simulator.config import LogNormal, Rollout, Simulation, Trainer, Weights, Work
from penstock.simulator.pipeline import simulate
from penstock.simulator.result import Result

MACHINE = MACHINES["H100"]
FLOPS_PER_VALUE = 8
"""FLOPs of a trainer per active parameter and token: forward twice, backward."""
TURNS, TOOL_S, PROMPT, OBSERVATION = 3.0, 2.0, 1000.0, 300.0
RESPONSE = LogNormal(median=3000, sigma=1.0, longest=32768)
GROUP_SIZE = 16
MAX_STALENESS = 2
TOKEN_BYTES = 12
"""Bytes of a token in a packed trajectory: id, logprob and version span of a token; 100k tokens pack into 1.2 MB."""


@dataclass(frozen=True)
class ScalePlan:
    """One line of the tables."""

    gpus: int
    model: str
    server_gpus: int
    rank_gpus: int
    servers: int
    ranks: int
    groups: int


PLANS = (
    ScalePlan(2, "Qwen2.5-7B", 1, 1, 1, 1, 8),
    ScalePlan(8, "Qwen2.5-7B", 1, 2, 6, 1, 16),
    ScalePlan(64, "Qwen2.5-7B", 1, 2, 52, 6, 64),
    ScalePlan(256, "Qwen2.5-32B", 4, 8, 52, 6, 64),
    ScalePlan(1024, "Qwen2.5-32B", 4, 8, 208, 24, 256),
    ScalePlan(2048, "Qwen3-235B-A22B", 8, 16, 216, 20, 256),
)


def setup(plan: ScalePlan, max_staleness: float = MAX_STALENESS) -> Simulation:
    """Rates from datasheets and `PLAN_INPUTS`."""
    model, decoding = MODELS[plan.model], planned("decode_factor")
    context = PROMPT + RESPONSE.mean + (TURNS - 1) * OBSERVATION
    rank_tokens_per_s = planned("flops_share") * plan.rank_gpus * MACHINE.flops / (FLOPS_PER_VALUE * model.active)
    return Simulation(
        max_staleness=max_staleness,
        group_size=GROUP_SIZE,
        groups_per_step=plan.groups,
        work=Work(
            prompt_tokens=PROMPT,
            response=RESPONSE,
            turns=TURNS,
            tool_s=LogNormal(median=TOOL_S, sigma=1.0, longest=60),
            observation_tokens=OBSERVATION,
        ),
        rollout=Rollout(
            servers=plan.servers,
            gpus=plan.server_gpus,
            concurrent=256,
            token_s=decoding * token_s(model, MACHINE, plan.server_gpus),
            token_s_per_sequence=decoding * token_s_per_sequence(model, MACHINE, plan.server_gpus, context),
        ),
        trainer=Trainer(
            ranks=plan.ranks,
            gpus=plan.rank_gpus,
            tokens_per_s=rank_tokens_per_s,
            balanced=True,
            update_fixed_s=gradient_exchange_s(
                model, MACHINE, plan.ranks * plan.rank_gpus // 2 or 1, plan.ranks * plan.rank_gpus
            ),
        ),
        weights=Weights(sync_s=nccl_s(model), pause_s=planned("pause_s")),
        steps=3,
        warmup=1,
    )


@cache
def simulated(plan: ScalePlan, max_staleness: float) -> Result:
    return simulate(setup(plan, max_staleness))


# weights -------------------------------------------------------------------------------------------------------
def broadcast_s(model: Model) -> float:
    """The `broadcast` transport over gloo: bucket by bucket to all at once, at the rate measured with two receivers."""
    return model.bytes / MEASURED["broadcast"].bytes_per_s


def nccl_s(model: Model) -> float:
    """A broadcast from GPU to GPU, at the rate that another project measured. For plans only."""
    return model.bytes / (1e9 * planned("nccl_gb_per_s"))


def http_s(model: Model, servers: int, kind: str = "http_full") -> float:
    """Servers hand files on, so copies double each round; ceil(log2(n + 1)) rounds, each at the measured rate.

    `kind`: ``http_full`` or ``http_delta``.
    """
    rounds = servers.bit_length()
    return rounds * model.bytes / MEASURED[kind].bytes_per_s


def from_trainer_s(model: Model, servers: int) -> float:
    """Returns the time if the trainer served all servers itself, one after the other."""
    return servers * model.bytes / MEASURED["http_full"].bytes_per_s


# queue --------------------------------------------------------------------------------------------------------
def queue_operations_per_s(config: Simulation, step_s: float) -> float:
    """Leases, two journal entries per turn (before and after its tools), completions, and the step's own calls.

    Renewals and heartbeats come on top, a few per worker and minute.
    """
    episodes = config.group_size * config.groups_per_step
    return (episodes * (2 + 2 * config.work.turns) + config.groups_per_step + 4) / step_s


def queue_bytes_per_s(config: Simulation, step_s: float) -> float:
    """Written: every token once in the journal and once in its trajectory. Read once by the trainer."""
    return 2 * TOKEN_BYTES * _tokens_per_step(config) / step_s


def queue_bytes_held(config: Simulation) -> float:
    """At most: (max_staleness + 1) steps of trajectories, or their journals; steps that are trained are spilled."""
    return (config.max_staleness + 1) * TOKEN_BYTES * _tokens_per_step(config)


def _tokens_per_step(config: Simulation) -> float:
    work = config.work
    tokens = work.prompt_tokens + work.response.mean + (work.turns - 1) * work.observation_tokens
    return config.group_size * config.groups_per_step * tokens


# tables --------------------------------------------------------------------------------------------------------
def head(*columns: str) -> Iterator[str]:
    """A table's first two lines."""
    yield f"| {' | '.join(columns)} |"
    yield f"| {' | '.join('---' for _ in columns)} |"


def step_table() -> Iterator[str]:
    yield from head(
        "GPUs",
        "model",
        "servers × GPUs",
        "ranks × GPUs",
        "step: sync",
        "staleness 2",
        "trainer waits",
        "servers wait",
        "tokens/s",
    )
    for plan in PLANS:
        asynchronous, waiting = simulated(plan, MAX_STALENESS), simulated(plan, 0)
        yield (
            f"| {plan.gpus} | {plan.model} | {plan.servers} × {plan.server_gpus} | {plan.ranks} × {plan.rank_gpus} "
            f"| {waiting.step_s:.0f} s | {asynchronous.step_s:.0f} s | {asynchronous.trainer_bubble:.0%} "
            f"| {asynchronous.rollout_bubble:.0%} | {asynchronous.tokens_per_s:,.0f} |"
        )


def weight_table() -> Iterator[str]:
    """Yield the rows of the table of weights, from measured rates alone."""
    yield from head(
        "model",
        "full version",
        "servers",
        "broadcast, gloo",
        "HTTP, handed on",
        "the same as a delta",
        "HTTP, all from the trainer",
    )
    for plan in PLANS:
        model, servers = MODELS[plan.model], plan.servers
        delta_s = http_s(model, servers, "http_delta")
        yield (
            f"| {plan.model} | {model.bytes / 1e9:.0f} GB | {servers} "
            f"| {broadcast_s(model):,.0f} s | {http_s(model, servers):,.0f} s "
            f"| {delta_s:,.0f} s | {from_trainer_s(model, servers):,.0f} s |"
        )


def cited_weight_table() -> Iterator[str]:
    yield from head("model", "full version", "NCCL, cited rate")
    for name in dict.fromkeys(plan.model for plan in PLANS):
        model = MODELS[name]
        yield f"| {name} | {model.bytes / 1e9:.0f} GB | {nccl_s(model):.1f} s |"


def rate_table() -> Iterator[str]:
    """Measured here, each with its key."""
    yield from head("measured here", "figure", "source")
    for name, rate in MEASURED.items():
        yield f"| {name} | {rate.bytes_per_s / 1e9:.2f} GB/s | {rate.source} |"
    source = f"`penstock bench weights`, `figures.pause`: {PAUSED_MB:g} MB, vLLM; two CPU cores, commit {MEASURED_AT}"
    yield f"| pause of a server | p50 {PAUSE_P50_S:.2f} s, p99 {PAUSE_P99_S:.2f} s | {source} |"


def input_table() -> Iterator[str]:
    """Not measured here."""
    yield from head("input of a plan", "value", "kind", "source")
    for name, value in PLAN_INPUTS.items():
        yield f"| `{name}` | {value.value:g} {value.unit} | {value.kind} | {value.source} |"


def queue_table() -> Iterator[str]:
    yield from head("GPUs", "episodes per step", "operations/s", "written", "held at most")
    for plan in PLANS:
        config = setup(plan)
        step_s = simulated(plan, MAX_STALENESS).step_s
        yield (
            f"| {plan.gpus} | {config.group_size * config.groups_per_step:,} "
            f"| {queue_operations_per_s(config, step_s):,.0f} | {queue_bytes_per_s(config, step_s) / 1e6:.1f} MB/s "
            f"| {queue_bytes_held(config) / 1e9:.2f} GB |"
        )


TABLES = {
    "steps": step_table,
    "queue": queue_table,
    "weights": weight_table,
    "layouts": layout_table,
    "weights_cited": cited_weight_table,
    "rates": rate_table,
    "inputs": input_table,
}


def rendered() -> dict[str, str]:
    return {name: "\n".join(table()) for name, table in TABLES.items()}


if __name__ == "__main__":
    print("\n\n".join(rendered().values()))
