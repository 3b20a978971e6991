"""Arithmetic from one GPU to thousands: a planned cluster, its step, what its queue carries, how long weights travel.

python -m penstock.simulator.scale        the tables of docs/scale.md
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from penstock.simulator.config import LogNormal, Rollout, Simulation, Trainer, Weights, Work
from penstock.simulator.hardware import MACHINES, MODELS, Model, gradient_exchange_s, token_s, token_s_per_sequence
from penstock.simulator.pipeline import simulate
from penstock.simulator.rates import RATES
from penstock.simulator.result import Result

MACHINE = MACHINES["H100"]
DECODE_FACTOR = 3.5
"""Engines beside the datasheet; verl's 7B runs come to 3.2 to 5.0."""
FLOPS_SHARE = 0.35
"""Of the datasheet's, that a trainer reaches, at 8 FLOPs per parameter and token (forward twice, backward)."""
TURNS, TOOL_S, PROMPT, OBSERVATION = 3.0, 2.0, 1000.0, 300.0
RESPONSE = LogNormal(median=3000, sigma=1.0, longest=32768)
GROUP_SIZE = 16
MAX_STALENESS = 2
TOKEN_BYTES = 12
"""Of a packed trajectory: id, logprob and version span of a token; 100k tokens pack into 1.2 MB."""
DELTA_SHARE = 0.021
"""Mean size of a delta beside a full version at a learning rate of 1e-6, as docs/weight_sync.md measures it."""


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
    """Rates from datasheets and the two factors above."""
    model = MODELS[plan.model]
    context = PROMPT + RESPONSE.mean + (TURNS - 1) * OBSERVATION
    rank_tokens_per_s = FLOPS_SHARE * plan.rank_gpus * MACHINE.flops / (8 * model.active)
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
            token_s=DECODE_FACTOR * token_s(model, MACHINE, plan.server_gpus),
            token_s_per_sequence=DECODE_FACTOR * token_s_per_sequence(model, MACHINE, plan.server_gpus, context),
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
        weights=Weights(sync_s=nccl_s(model), pause_s=0.5),
        steps=3,
        warmup=1,
    )


@cache
def simulated(plan: ScalePlan, max_staleness: float) -> Result:
    return simulate(setup(plan, max_staleness))


# weights -------------------------------------------------------------------------------------------------------
def broadcast_s(model: Model) -> float:
    """The `collective` transport: one broadcast of the whole file, at the rate that was measured with one receiver."""
    return model.bytes / RATES["broadcast"].bytes_per_s


def nccl_s(model: Model) -> float:
    """A broadcast from GPU to GPU, at the rate that another project measured."""
    return model.bytes / RATES["nccl"].bytes_per_s


def http_s(model: Model, servers: int, share: float = 1.0) -> float:
    """Servers hand files on, so copies double each round; ceil(log2(n + 1)) rounds, each at the measured rate."""
    rounds = servers.bit_length()
    return rounds * share * model.bytes / RATES["http"].bytes_per_s


def from_trainer_s(model: Model, servers: int) -> float:
    """What it would take if the trainer served every server itself, one after the other."""
    return servers * model.bytes / RATES["http"].bytes_per_s


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
        found, waiting = simulated(plan, MAX_STALENESS), simulated(plan, 0)
        yield (
            f"| {plan.gpus} | {plan.model} | {plan.servers} × {plan.server_gpus} | {plan.ranks} × {plan.rank_gpus} "
            f"| {waiting.step_s:.0f} s | {found.step_s:.0f} s | {found.trainer_bubble:.0%} "
            f"| {found.rollout_bubble:.0%} | {found.tokens_per_s:,.0f} |"
        )


def weight_table() -> Iterator[str]:
    yield from head(
        "model",
        "full version",
        "servers",
        "NCCL (cited)",
        "broadcast, gloo",
        "HTTP, handed on",
        "the same as a delta",
        "HTTP, all from the trainer",
    )
    for plan in PLANS:
        model, servers = MODELS[plan.model], plan.servers
        yield (
            f"| {plan.model} | {model.bytes / 1e9:.0f} GB | {servers} | {nccl_s(model):.1f} s "
            f"| {broadcast_s(model):,.0f} s | {http_s(model, servers):,.0f} s "
            f"| {http_s(model, servers, DELTA_SHARE):,.1f} s | {from_trainer_s(model, servers):,.0f} s |"
        )


def rate_table() -> Iterator[str]:
    yield from head("rate", "GB/s", "measured here", "source")
    for name, rate in RATES.items():
        yield f"| {name} | {rate.bytes_per_s / 1e9:.2f} | {'yes' if rate.measured else 'no: cited'} | {rate.source} |"


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


TABLES = {"steps": step_table, "weights": weight_table, "rates": rate_table, "queue": queue_table}


def rendered() -> dict[str, str]:
    return {name: "\n".join(table()) for name, table in TABLES.items()}


if __name__ == "__main__":
    print("\n\n".join(rendered().values()))
