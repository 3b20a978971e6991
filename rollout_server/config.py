"""Configuration of rollout servers and their engines."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator


class RolloutConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: Literal["hf", "vllm", "sglang", "served"] = Field(
        "hf",
        description="Inference engine: transformers, stock vLLM or stock SGLang; served: a server that runs already,"
        " for `penstock eval` alone.",
    )
    url: str | None = Field(
        None, description="Of the server, where engine is served; `penstock eval` sets it from --url."
    )
    servers: int = Field(1, ge=0, description="Rollout servers that `penstock run` starts.")
    evaluation_server: bool = Field(
        False, description="One more server, for evaluations only; each evaluation is sampled by one policy version."
    )
    host: str = Field("127.0.0.1", description="Address the sidecar listens on; engines always stay on loopback.")
    port: int = Field(0, ge=0, le=65535, description="First sidecar port; 0 takes free ones.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32",
        description="Arithmetic of the engine and of published versions; on GPUs set bfloat16, the trainer's there.",
    )
    max_model_len: int = Field(1024, gt=0, description="Prompt plus response, in tokens.")
    max_concurrent: int = Field(64, gt=0, description="Requests decoded together; further ones wait in the sidecar.")
    threads: int = Field(1, gt=0, description="CPU threads of the engine process.")
    kv_cache_tokens: int = Field(20480, gt=0, description="Size of the KV cache in tokens: hf, and SGLang on CPUs.")
    pause: Literal["keep", "recompute", "abort"] = Field(
        "keep",
        description="In-flight requests at a weight swap: continue with their KV cache, recompute it first, or abort,"
        " and the client resumes them.",
    )
    weight_transport: Literal["shm", "disk", "http", "broadcast", "nccl"] = Field(
        "shm",
        description="How weights travel from trainer to server: one machine, a shared disk, over HTTP, or broadcast to"
        " the workers of the servers that are ready (the others: HTTP). nccl: broadcast, from GPU to GPU where both"
        " sides have one.",
    )
    broadcast_receive: Literal["staged", "in_place"] = Field(
        "staged",
        description="Where a broadcast is received (broadcast, nccl). staged: into memory for one more version, while"
        " decoding; in_place: under the pause, bucket by bucket into the engine's parameters, where memory has no room"
        " for that. Engines hf and vllm.",
    )
    weights_host: str = Field(
        "127.0.0.1", description="Address that the trainer serves weights on (http, broadcast, nccl)."
    )
    weights_port: int = Field(0, ge=0, le=65535, description="Its port; 0 takes a free one.")
    weights_full_every: int = Field(
        1,
        gt=0,
        description="One in this many versions is full, the others hold changed values only; 1: all are full. Under"
        " broadcast and nccl all are full, and one in this many has its file written at once, not only when a server"
        " needs it.",
    )
    start_timeout_s: float = Field(
        180.0,
        gt=0,
        description="Deadline of an engine's start, and of reading, comparing or loading a version, besides 10 s for"
        " each GB of weights; then it is restarted.",
    )
    request_timeout_s: float = Field(120.0, gt=0, description="Deadline of one generate call, waiting included.")
    routing_replay: bool = Field(
        False,
        description="Mixtures of experts: engines record which experts read each token, and the trainer lets the same"
        " ones read it (R3). Engines hf, vllm and sglang; text only.",
    )
    adapter_rank: int = Field(
        0,
        ge=0,
        le=512,
        description="Largest rank of LoRA adapters that requests may name, eight of them at once; 0: none."
        " `penstock serve` sets it to trainer.lora.rank.",
    )
    kv_offload_gb: int = Field(
        0,
        ge=0,
        description="Host memory of a server in GB for keys and values that leave its GPUs: an episode whose tool takes"
        " long finds its context there, and its next turn computes new tokens only. 0: none. Engines vllm and sglang.",
    )
    truncated_sampling: bool = Field(
        False, description="Allow top_p below 1 and top_k, which bias the policy gradient."
    )
    max_restarts: int = Field(
        5,
        ge=0,
        description="Engine failures in a row, and restarts of a server within an hour.",
    )
    vllm_python: str | None = Field(
        None, description="Python of the environment with vLLM; None: .venv-vllm, else this one."
    )
    vllm_args: dict[str, Any] = Field(
        default_factory=dict, description="Further `vllm serve` flags, by name; null removes one of Penstock's."
    )
    sglang_python: str | None = Field(
        None, description="Python of the environment with SGLang; None: .venv-sglang, else this one."
    )
    sglang_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Further `sglang.launch_server` flags, by name; null removes one of Penstock's.",
    )

    @property
    def manifest_transport(self) -> Literal["shm", "disk", "http", "broadcast"]:
        """Name of the transport in manifests: nccl is a broadcast."""
        return "broadcast" if self.weight_transport == "nccl" else self.weight_transport

    @property
    def broadcasts_weights(self) -> bool:
        return self.manifest_transport == "broadcast"

    @property
    def receives_in_place(self) -> bool:
        return self.broadcast_receive == "in_place"

    @property
    def serves_weights(self) -> bool:
        """The trainer listens for servers that fetch files."""
        return self.manifest_transport in ("http", "broadcast")

    @field_validator("weight_transport", mode="before")
    @classmethod
    def _refuse_rounds(cls, value: object) -> object:
        """Raises `ValueError`: what recipes of earlier releases name exists no more."""
        if value == "collective":
            raise ValueError("collective is replaced by broadcast: set rollout.weight_transport=broadcast")
        return value

    @field_validator("kv_offload_gb")
    @classmethod
    def _refuse_offload(cls, value: int, info: ValidationInfo) -> int:
        """Raises `ValueError` where nothing would be offloaded, or what belongs to it would be lost."""
        if not value:
            return value
        engine = info.data.get("engine")
        if engine in ("hf", "served"):
            raise ValueError(f"only vllm and sglang offload keys and values: set it to 0, rollout.engine is {engine}")
        if info.data.get("routing_replay"):
            raise ValueError(
                "the experts of tokens are not kept with keys and values in host memory: set it to 0, or"
                " rollout.routing_replay=false"
            )
        return value

    @field_validator("broadcast_receive")
    @classmethod
    def _refuse_in_place(cls, value: str, info: ValidationInfo) -> str:
        """Raises `ValueError` where nothing would be received in place."""
        engine, transport = info.data.get("engine"), info.data.get("weight_transport")
        if value != "in_place" or engine is None or transport is None:
            return value
        if transport not in ("broadcast", "nccl"):
            raise ValueError(f"in_place is of broadcasts: set rollout.weight_transport=broadcast, it is {transport}")
        if engine == "sglang":
            raise ValueError(
                "sglang receives in place only in a separate group, which waits half an hour for a silent trainer"
                " with the engine paused, and cannot be left: set staged, or take vllm"
            )
        if engine == "served":
            raise ValueError("a served engine loads no weights: set staged")
        return value
