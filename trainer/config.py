"""Settings of the trainer and its learning-rate schedule: warmed up linearly, then constant or linear to a floor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from penstock.trainer.ranks.layout import RankLayout


class KLConfig(BaseModel):
    """The pull towards the reference policy: the run's model before training."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    in_reward: float = Field(0.0, ge=0, description="KL coefficient in the reward of each token; 0: none.")
    in_loss: float = Field(0.0, ge=0, description="KL coefficient in the loss; 0: none.")
    estimator: Literal["k1", "k2", "k3", "low_variance"] = Field(
        "k3", description="How KL is estimated from two logprobs; in_reward is customary with k1."
    )
    target: float | None = Field(
        None, gt=0, description="in_reward is steered towards this KL per episode; None: it stays."
    )
    horizon: int = Field(10_000, gt=0, description="Episodes over which in_reward is steered; more is slower.")
    reference_dtype: Literal["float32", "bfloat16"] | None = Field(
        None,
        description="Of the reference policy's weights; None: trainer.dtype, which changes no number. With "
        "trainer.dtype float32, bfloat16 halves them and rounds what they say.",
    )

    @property
    def needs_reference(self) -> bool:
        return self.in_reward > 0 or self.in_loss > 0


class DistillConfig(BaseModel):
    """The pull towards the teachers of `agent.teachers`, token by token (docs/guide/distillation.md)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    in_advantage: float = Field(
        0.0, ge=0, description="Each token's advantage loses this times logπ − log p of the teacher; 0: none."
    )
    in_loss: float = Field(
        0.0, ge=0, description="Coefficient of the divergence from the teacher in the loss; 0: none."
    )
    estimator: Literal["k2", "k3", "low_variance"] = Field(
        "k2",
        description="How in_loss estimates the reverse KL from sampled tokens; the gradient of k2 is that of the KL.",
    )
    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = Field(
        "reverse_kl",
        description="What in_loss computes in place of an estimate where agent.teachers.*.top_k gives the teacher's"
        " likeliest ids: over these and the rest of the probability.",
    )
    jsd_beta: float = Field(
        0.5, gt=0, lt=1, description="Of divergence jsd: share of the teacher in the mixture that both are compared to."
    )
    reward_weight: float = Field(
        1.0, ge=0, description="The estimator's advantages count this much next to the teacher; 0: the teacher alone."
    )
    clip: float = Field(20.0, gt=0, description="logπ − log p of a token is held within this of 0.")

    @property
    def enabled(self) -> bool:
        return self.in_advantage > 0 or self.in_loss > 0


class TrainedSourceConfig(BaseModel):
    """Training settings of the tasks of one data source."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    advantage: str | None = Field(
        None, description="As `trainer.advantage`, but none with a critic or a greedy member; None: that one."
    )
    advantage_options: dict[str, Any] = Field(default_factory=dict, description="Its settings.")
    group_size: int | None = Field(None, ge=1, description="Episodes per task; None: the run's `group_size`.")

    @model_validator(mode="after")
    def _options_have_an_estimator(self) -> Self:
        if self.advantage_options and self.advantage is None:
            raise ValueError("advantage_options are settings of an advantage: name it as well")
        return self


class CriticConfig(BaseModel):
    """The value model of `gae`, `turn_gae` and `vapo`, the run's model with a head of one number; the implicit reward
    model of `prime`, the run's model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr: float = Field(1e-5, gt=0, description="AdamW learning rate of the critic.")
    warmup_steps: int = Field(0, ge=0, description="First steps in which the critic alone learns (value pre-training).")
    clip: float = Field(
        0.5, gt=0, description="A value moves at most this far from the step's start before its loss stops."
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Of its weights and moments; bfloat16 takes half the memory, and loses updates below its spacing.",
    )


class OverlongConfig(BaseModel):
    """DAPO's soft punishment of long episodes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    length: int = Field(0, ge=0, description="Sampled tokens from which on the whole penalty is due; 0: no penalty.")
    buffer: int = Field(0, ge=0, description="The penalty grows over this many tokens before `length`.")
    penalty: float = Field(1.0, gt=0, description="Taken from the reward at `length` and beyond.")

    @model_validator(mode="after")
    def _check(self) -> OverlongConfig:
        if self.buffer > self.length:
            raise ValueError(f"overlong.buffer is {self.buffer}, more than overlong.length {self.length}")
        return self


class ParallelConfig(BaseModel):
    """The split of one copy of the model over ranks; `trainer.ranks` holds as many copies as fit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tensor: int = Field(1, gt=0, description="Ranks that share each matrix; within one machine.")
    pipeline: int = Field(1, gt=0, description="Groups of layers on ranks of their own (megatron).")
    context: int = Field(1, gt=0, description="Ranks that share the tokens of each row, for very long rows.")
    expert: int = Field(1, gt=0, description="Ranks that share out a mixture's experts, among all copies.")
    replicate: int = Field(
        1, gt=0, description="Sets of ranks of which each holds all weights and moments in shards (HSDP, fsdp)."
    )

    @property
    def layout(self) -> RankLayout:
        return RankLayout(self.tensor, self.context, self.pipeline, self.replicate, self.expert)


class MegatronConfig(BaseModel):
    """Settings of trainer.engine megatron."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    python: str | None = Field(
        None,
        description="Python of the environment that holds megatron-core; None looks for .venv-megatron, then this one.",
    )


class LoraConfig(BaseModel):
    """Low-rank matrices learn in place of the model's own; versions and checkpoints then have only them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(0, ge=0, description="Rank of the matrices; 0: no LoRA, the whole model learns.")
    alpha: float = Field(16.0, gt=0, description="Their product counts alpha / rank times.")
    targets: str | tuple[str, ...] = Field(
        "all-linear",
        description="Names of the modules that get them; all-linear: all matrices but the head and those of experts "
        "that are one stack; experts: those. [all-linear, experts] is both.",
    )

    @property
    def names(self) -> tuple[str, ...]:
        return (self.targets,) if isinstance(self.targets, str) else self.targets


class StopConfig(BaseModel):
    """Ends a run before its last step, with everything that follows the last step."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    metric: str = Field("eval/reward", description="Name in metrics.jsonl that decides.")
    better: Literal["higher", "lower"] = Field("higher", description="Which way the metric gets better.")
    target: float | None = Field(None, description="The run is over when the metric is here; None: no target.")
    patience: int = Field(0, ge=0, description="Consecutive values without improvement that end the run; 0: never.")
    window: int = Field(1, gt=0, description="Values are means over this many steps.")

    @property
    def enabled(self) -> bool:
        return self.target is not None or self.patience > 0


class WandbConfig(BaseModel):
    """Only where trainer.sinks has wandb; key, account and server come from W&B's own variables (WANDB_API_KEY …)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    project: str = Field("penstock", min_length=1, description="Project at W&B.")
    group: str | None = Field(None, description="Runs of one group are drawn together; None: no group.")
    samples: int = Field(0, ge=0, description="Episodes per step whose text is sent; 0: numbers only.")


class TrainerConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: str = Field("fsdp", description="Registered training engine: fsdp or megatron.")
    parallel: ParallelConfig = ParallelConfig()
    megatron: MegatronConfig = MegatronConfig()
    steps: int = Field(40, gt=0, description="Optimizer steps (published versions) of the run.")
    ranks: int = Field(
        1, gt=0, description="Trainer processes; torchrun starts several, over several machines as many on each."
    )
    threads: int | None = Field(
        None,
        gt=0,
        description="CPU threads per trainer process; None: 1, under offload on GPUs the machine's cores, or those"
        " that the trainer reserves on Ray, / its ranks.",
    )
    advantage: str = Field("grpo", description="Registered advantage estimator.")
    advantage_options: dict[str, Any] = Field(
        default_factory=dict, description="Settings of the estimator; the page 'Algorithms' lists them."
    )
    sources: dict[str, TrainedSourceConfig] = Field(
        default_factory=dict,
        description="Data source or pattern (`my_*`) → advantage estimator and group size of its tasks, in place of "
        "`advantage` and the run's `group_size`.",
    )
    turn_reward_weight: float = Field(
        0.0, description="Turn rewards count this much next to the episode's reward; 0: not at all."
    )
    filter: str | None = Field(
        None, description="Registered episode filter, for example pf_ppo; None: all weigh the same."
    )
    filter_options: dict[str, Any] = Field(default_factory=dict, description="Settings of the filter.")
    loss: str = Field("decoupled_ppo", description="Registered policy loss.")
    loss_options: dict[str, Any] = Field(
        default_factory=dict, description="Settings of the loss, such as clip_low and clip_high."
    )
    aggregation: Literal["token_mean", "episode_mean", "episode_sum", "constant"] = Field(
        "token_mean", description="How tokens' losses become one number, see the page 'Algorithms'."
    )
    aggregation_length: int = Field(
        0, ge=0, description="Under aggregation constant: what each episode's sum is divided by."
    )
    proximal: Literal["recomputed", "interpolated", "behaviour"] = Field(
        "recomputed", description="The policy that an update must stay near: scored, approximated, or the engine's."
    )
    correction: str | None = Field(
        "truncated_is", description="Registered off-policy correction; needed where max_staleness > 0."
    )
    correction_options: dict[str, Any] = Field(
        default_factory=dict, description="Settings of the correction, such as cap and level."
    )
    entropy_bonus: float = Field(0.0, description="Entropy of each token's distribution, times this, is maximised.")
    kl: KLConfig = KLConfig()
    distill: DistillConfig = DistillConfig()
    critic: CriticConfig = CriticConfig()
    overlong: OverlongConfig = OverlongConfig()
    minibatches: int = Field(1, gt=0, description="Optimizer updates per step; each takes its share of the groups.")
    lr: float = Field(1e-6, gt=0, description="AdamW learning rate.")
    warmup_steps: int = Field(0, ge=0, description="Linear warm-up of the learning rate.")
    lr_schedule: Literal["constant", "linear"] = Field(
        "constant", description="After the warm-up; linear decays to the floor."
    )
    lr_floor: float = Field(0.1, ge=0, le=1, description="Share of lr that the last step has under lr_schedule linear.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW betas.")
    eps: float = Field(1e-8, gt=0, description="AdamW epsilon.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this norm.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Arithmetic; master weights stay float32. auto: bfloat16 on GPUs, float32 on CPUs."
    )
    lora: LoraConfig = LoraConfig()
    recompute: bool | Literal["selective"] = Field(
        False,
        description="Each layer's activations are computed again in the backward, not kept: less memory, slower. "
        "selective (fsdp) keeps attention's and every second matrix product's: between the two in both.",
    )
    offload: bool | Literal["optimizer"] = Field(
        False,
        description="On GPUs: weights and moments stay in the host's memory, AdamW runs there; gradients go there once "
        "per update. optimizer: only the moments, which cross to the device and back in each update.",
    )
    activation_offload: bool = Field(
        False,
        description="What layers save for the backward waits in the host's memory; with recompute their inputs alone.",
    )
    compile: bool = Field(False, description="Layers are compiled by torch; the first steps take minutes.")
    liger: bool = Field(False, description="On GPUs: Liger's fused kernels for norms, rotary embedding and MLP.")
    peak_tflops: float | None = Field(
        None, gt=0, description="Peak of one rank's device in TFLOP/s, for mfu; None: as known GPUs have in bfloat16."
    )
    micro_batch_tokens: int = Field(2048, gt=0, description="Token budget of one packed forward and backward.")
    checkpoint_every: int = Field(10, gt=0, description="Steps between checkpoints (and queue commits).")
    keep_checkpoints: int = Field(2, gt=0, description="Newest checkpoints kept.")
    stop: StopConfig = StopConfig()
    eval_every: int = Field(0, ge=0, description="Steps between evaluations; 0: only at the end.")
    batch_timeout_s: float = Field(
        300.0, gt=0, description="A batch not ready by then stops the run, and the cause is named."
    )
    publish_timeout_s: float = Field(
        900.0, gt=0, description="Writing one version of the weights; a disk that takes longer stops the trainer."
    )
    rank_timeout_s: float = Field(
        30.0,
        ge=0,
        description="With several ranks: one that is silent for so long is named. All ranks end if its process is "
        "stopped, else after collective_timeout_s. 0: no heartbeats.",
    )
    collective_timeout_s: float = Field(
        600.0,
        gt=0,
        description="Deadline of one collective of the ranks (NCCL, gloo): slow work of a rank, such as compilation, "
        "may keep the others so long.",
    )
    max_bad_steps: int = Field(
        3,
        ge=0,
        description="Steps in a row whose loss or gradient is not finite, or with nothing to train, that are let pass.",
    )
    stop_grace_s: float | None = Field(
        None,
        gt=0,
        description="From SIGTERM until the trainer is killed: the last checkpoint is written and committed meanwhile. "
        "None: by the bytes of a checkpoint at 20 MB/s per rank, at least 25 s. torchrun, the supervisor, Slurm's "
        "--signal and Compose wait a little longer.",
    )
    max_restarts: int = Field(3, ge=0, description="Restarts of the trainer after a crash, within an hour.")
    save_trajectories: int = Field(
        8, ge=0, description="Trajectories kept per step to read: the best, the worst, a sample."
    )
    sinks: tuple[str, ...] = Field(
        ("tensorboard",),
        description="Where the numbers go besides metrics.jsonl: tensorboard, wandb, or package.module:function.",
    )
    wandb: WandbConfig = WandbConfig()

    @model_validator(mode="after")
    def _selects_under_fsdp(self) -> Self:
        if self.recompute == "selective" and self.engine == "megatron":
            raise ValueError("recompute selective is the engine fsdp's: set it to true or false under megatron")
        return self

    def resolve_dtype(self, *, on_gpu: bool) -> TrainerConfig:
        """These settings for ranks with GPUs or without: `dtype` is not ``auto``. What computes or counts bytes asks
        first."""
        if self.dtype != "auto":
            return self
        return self.model_copy(update={"dtype": "bfloat16" if on_gpu else "float32"})

    def dtype_mismatch(self, rollout_dtype: str, *, on_gpu: bool) -> tuple[str, str] | None:
        """Return why and how to correct it, if the engine computes in another type than ranks with GPUs or without."""
        mine = self.resolve_dtype(on_gpu=on_gpu).dtype
        if mine == rollout_dtype:
            return None
        chosen = f" (auto, on {'GPUs' if on_gpu else 'CPUs'})" if self.dtype == "auto" else ""
        other = f", or trainer.dtype={rollout_dtype}" if rollout_dtype != "float16" else ""
        return (
            f"trainer.dtype is {mine}{chosen}, rollout.dtype {rollout_dtype}: the two compute other logprobs for the"
            " same tokens",
            f"set rollout.dtype={mine}{other}",
        )

    def threads_of_rank(self, cores: int, ranks: int, *, on_gpu: bool) -> int:
        """CPU threads of each of the `ranks` that have `cores` of a machine together. AdamW alone takes many, if it
        is the host's: next to an engine on CPUs more than one for each process is slower."""
        if self.threads is not None:
            return self.threads
        return max(1, cores // max(1, ranks)) if self.offload is True and on_gpu else 1

    def anywhere(self) -> TrainerConfig:
        """Without what concerns speed and memory alone: that may ask for a machine or packages that are not here."""
        return self.model_copy(update={"liger": False, "compile": False, "offload": False})


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """The settings of one optimizer update."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Decoupled, as torch's AdamW has it."""
    max_grad_norm: float = 0.0
    """Gradients are clipped to this norm; 0: they are not."""


def adam_settings(config: TrainerConfig, lr: float) -> AdamSettings:
    """Return the run's settings with the learning rate `lr`."""
    return AdamSettings(lr, config.betas, config.eps, config.weight_decay, config.max_grad_norm)


def learning_rate(config: TrainerConfig, step: int) -> float:
    """lr · warm-up(step) · decay(step), step from 0.

    warm-up = min(1, (step + 1) / warmup_steps); decay = 1, or with schedule ``linear``
    1 − (1 − lr_floor) · step / (steps − 1), so that the last step has lr · lr_floor.
    """
    warmup = min(1.0, (step + 1) / max(1, config.warmup_steps))
    if config.lr_schedule == "constant":
        return config.lr * warmup
    progress = min(1.0, step / max(1, config.steps - 1))
    return config.lr * warmup * (1.0 - (1.0 - config.lr_floor) * progress)
