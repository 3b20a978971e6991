"""The bodies of requests, as Tinker's SDK sends them and as they lie in the log; and what is recorded of their results.

Fields that this server does not know are ignored where they cannot change a number, and refused by name where they can.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator

from penstock.transfer_queue import Record, RequestLog

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
"""The name of a checkpoint: a part of a path, so it has no slash and does not begin with a dot."""
Number = Annotated[int, Field(ge=0, lt=2**62)]
PathKind = Literal["weights", "sampler_weights", "external_weights"]
CHECKPOINT_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}


class Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


# training ----------------------------------------------------------------------------------------------------------
class LoraSettings(Body):
    rank: int = Field(32, gt=0)
    seed: int | None = Field(None, ge=0, lt=2**63)
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True


class OptimizerKind(Body):
    type: Literal["adamw"] = "adamw"


class CreateModel(Body):
    session_id: str
    model_seq_id: Number
    base_model: str
    lora_config: LoraSettings = LoraSettings()
    optimizer_config: OptimizerKind = OptimizerKind()
    user_metadata: dict[str, Any] | None = None


class AdamParams(Body):
    learning_rate: float = Field(1e-4, ge=0, allow_inf_nan=False)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, ge=0, allow_inf_nan=False)
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    grad_clip_norm: float = Field(0.0, ge=0, allow_inf_nan=False)


class ModelCall(Body):
    model_id: str
    seq_id: int = Field(gt=0, lt=2**31)


class OptimStep(ModelCall):
    adam_params: AdamParams


class SaveWeights(ModelCall):
    path: Name | None = None
    ttl_seconds: int | None = Field(None, gt=0)
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveForSampler(ModelCall):
    path: Name | None = None
    sampling_session_seq_id: Number | None = None
    ttl_seconds: int | None = Field(None, gt=0)
    user_metadata: dict[str, str] | None = None


class SaveExternal(ModelCall):
    path: Name
    ttl_seconds: int | None = Field(None, gt=0)
    age_encryption_recipients: None = None


class LoadWeights(Body):
    """Loads weights into a model (`model_id`, `seq_id`), or as a new model (`session_id`, `model_seq_id`)."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = Field(None, gt=0, lt=2**31)
    session_id: str | None = None
    model_seq_id: Number | None = None
    user_metadata: dict[str, Any] | None = None
    weights_access_token: None = None


# sampling ----------------------------------------------------------------------------------------------------------
class SamplingParams(Body):
    max_tokens: int | None = Field(None, gt=0)
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(1.0, ge=0, le=100)
    top_k: int = Field(-1, ge=-1)
    top_p: float = Field(1.0, gt=0, le=1)


class TextChunk(Body):
    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]]


class Prompt(Body):
    chunks: list[TextChunk]

    @property
    def ids(self) -> list[int]:
        return [one for chunk in self.chunks for one in chunk.tokens]


class Sample(Body):
    prompt: Prompt
    sampling_params: SamplingParams = SamplingParams()
    num_samples: int = Field(1, gt=0, le=1024)
    sampling_session_id: str
    seq_id: Number
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Literal[0] = 0
    topk_sample_logprobs: Literal[0] = 0
    target_prompt_logprobs: None = None
    prompt_alt_tokens_k: Literal[0] = 0
    prompt_logprobs_last_n: int | None = Field(None, gt=0)

    @field_validator("prompt")
    @classmethod
    def _has_tokens(cls, prompt: Prompt) -> Prompt:
        if not 0 < len(prompt.ids) <= 1 << 22:
            raise ValueError(f"has {len(prompt.ids)} tokens")
        return prompt


class SamplingSession(Body):
    session_id: str
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None


# records -----------------------------------------------------------------------------------------------------------
class Owned(Body):
    """A record of something that a key has made."""

    KIND: ClassVar[str]
    owner: str

    def record(self, name: str) -> Record:
        return Record(self.KIND, name, self.model_dump_json())

    @classmethod
    async def read(cls, requests: RequestLog, name: str) -> Self | None:
        """None if there is none."""
        text = await requests.record(cls.KIND, name)
        return None if text is None else cls.model_validate_json(text)

    @classmethod
    async def read_all(cls, requests: RequestLog) -> dict[str, Self]:
        """Return all of the kind by name."""
        texts = await requests.records(cls.KIND)
        return {name: cls.model_validate_json(text) for name, text in texts.items()}

    @classmethod
    async def remove(cls, requests: RequestLog, name: str) -> None:
        await requests.put(Record(cls.KIND, name, ""))


FINISHED_S, SILENT_S = 60.0, 24 * 3600.0
"""After its end, or its last heartbeat, a session is over."""


class SessionRecord(Owned):
    KIND = "session"
    created: float
    seen: float
    """The time of the last heartbeat."""
    is_finished: bool = False
    user_metadata: dict[str, Any] | None = None

    def is_over(self, now: float) -> bool:
        """Returns True if its models and samplers are removed, or soon will be."""
        return now - self.seen > (FINISHED_S if self.is_finished else SILENT_S)


class RunRecord(Owned):
    """A model of a client."""

    KIND = "run"
    session_id: str
    base_model: str
    rank: int
    created: float
    lora: LoraSettings = LoraSettings()
    user_metadata: dict[str, Any] | None = None


class SamplerRecord(Owned):
    KIND = "sampler"
    session_id: str
    base_model: str
    model_path: str | None = None
    folder: str | None = None
    """Below the service's folder; None: the base model."""
    saved: float | None = None
    """`CheckpointRecord.created` of `model_path`: a later save under that name is of other weights."""


class CheckpointRecord(Owned):
    """A checkpoint by its tinker path; its name in the records is that path."""

    KIND = "checkpoint"
    run_id: str
    kind: PathKind
    name: str
    bytes: int
    created: float
    lora: LoraSettings
    base_model: str
    expires: float | None = None
    user_metadata: dict[str, str] | None = None

    @property
    def path(self) -> CheckpointPath:
        return CheckpointPath(run_id=self.run_id, kind=self.kind, name=self.name)


class CheckpointPath(BaseModel):
    run_id: str
    kind: PathKind
    name: Name

    @classmethod
    def parse(cls, path: str) -> CheckpointPath | None:
        """None for a path that is none of this server's."""
        kinds = "|".join(CHECKPOINT_TYPES)
        match = re.fullmatch(rf"tinker://([A-Za-z0-9:_-]+)/({kinds})/([A-Za-z0-9._-]+)", path)
        try:
            return cls(run_id=match[1], kind=match[2], name=match[3]) if match else None
        except ValueError:
            return None

    def __str__(self) -> str:
        return f"tinker://{self.run_id}/{self.kind}/{self.name}"


def checkpoint_folder(root: Path, path: CheckpointPath) -> Path:
    return root / "checkpoints" / folder_name(path.run_id) / path.kind / path.name


def folder_name(name: str) -> str:
    """A model's or a sampler's id as the name of a folder."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)
