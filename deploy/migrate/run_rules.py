"""Rules for the data, sizes, agents and processes of a run: verl's settings that only together make ours.

A rule yields (our key, value); `note` says what a person must know, `lose` that a value has no counterpart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from penstock.deploy.migrate.settings import ACTOR, MODEL, ROLLOUT, Setting, VerlSettings
from penstock.rollout_server import RolloutConfig

PARSERS = {"hermes": "hermes", "qwen3_coder": "qwen3_coder", "llama3_json": "llama3_json", "gpt-oss": "harmony"}
DTYPES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
MAX_TURNS = 8
"""Bound if verl sets none; here an episode always has one."""
SLOW_TOKEN_S = 0.1
"""Seconds of a sampled token on a busy engine, for deadlines, which verl does not have."""


def leaving(verl: VerlSettings) -> Iterator[Setting]:
    yield ("name", re.sub(r"[^A-Za-z0-9._-]+", "-", str(verl["trainer.experiment_name"])).strip("-._")[:64] or "run")
    save = int(verl["trainer.save_freq"] or -1)
    yield "trainer.checkpoint_every", save if save > 0 else 10
    if save <= 0 and verl.has("trainer.save_freq"):
        verl.note("save_freq: every tenth step is saved, since a run without checkpoints cannot continue after a crash")
    test = int(verl.first("rollout.test_freq", "trainer.test_freq") or -1)
    if test > 0:
        yield "trainer.eval_every", test


def sinks(verl: VerlSettings) -> Iterator[Setting]:
    """Only if the loggers are given: verl's default is W&B, which needs an account."""
    if not verl.has("trainer.logger"):
        return
    value = verl["trainer.logger"]
    loggers = [value] if isinstance(value, str) else list(value or [])
    if "wandb" in loggers:
        yield "trainer.sinks", sorted({"tensorboard", "wandb"} & set(loggers))
        if verl["trainer.project_name"]:
            yield "trainer.wandb.project", str(verl["trainer.project_name"])
    if others := sorted(set(loggers) - {"console", "file", "tensorboard", "wandb"}):
        verl.lose("trainer.logger", f"{', '.join(others)}: write it as a function and name it in trainer.sinks")


def data(verl: VerlSettings) -> Iterator[Setting]:
    for theirs, ours in (("data.train_files", "data.train"), ("data.val_files", "data.eval")):
        value = verl[theirs]
        files = [value] if isinstance(value, str) else list(value or [])
        if len(files) > 1:
            verl.lose(theirs, f"one file is read, the first of {len(files)}: join them into one")
        if files:
            yield ours, str(Path(files[0]).expanduser())
    limit = verl["data.val_max_samples"]
    if limit is not None and limit >= 0:
        yield "data.eval_limit", limit


def model(verl: VerlSettings) -> Iterator[Setting]:
    path = str(verl[f"{MODEL}.path"])
    yield "model", str(Path(path).expanduser()) if path.startswith("~") else path


def sizes(verl: VerlSettings) -> Iterator[Setting]:
    yield "groups_per_step", verl.groups_per_step
    yield "group_size", verl.first("rollout.n", f"{ROLLOUT}.n")
    updates = max(1, verl.groups_per_step // verl.mini_batch)
    if verl.groups_per_step % verl.mini_batch:
        verl.note(
            f"ppo_mini_batch_size {verl.mini_batch} does not divide train_batch_size {verl.groups_per_step}: "
            f"trainer.minibatches is {updates}"
        )
    yield "trainer.minibatches", updates
    key = "trainer.v1.separate_async.parameter_sync_step"
    if verl.v1_mode == "separate_async" and verl.has(key) and int(verl[key]) != updates:
        verl.note(f"parameter_sync_step={verl[key]}: weights are published once per step, after its {updates} updates")


def lengths(verl: VerlSettings) -> Iterator[Setting]:
    yield "agent.max_response_tokens", verl.response
    yield "agent.max_new_tokens", verl.response
    yield "rollout.max_model_len", verl[f"{ROLLOUT}.max_model_len"] or verl["data.max_prompt_length"] + verl.response


def deadlines(verl: VerlSettings) -> Iterator[Setting]:
    """Deadlines for a whole answer at `SLOW_TOKEN_S`: an episode has two answers, a batch two episodes."""
    seconds = round(verl.response * SLOW_TOKEN_S)
    if seconds <= RolloutConfig().request_timeout_s:
        return
    yield "rollout.request_timeout_s", float(seconds)
    yield "agent.episode_deadline_s", float(2 * seconds)
    yield "trainer.batch_timeout_s", float(4 * seconds)
    verl.note(
        f"verl has no deadlines: an answer may take {seconds} s here, an episode {2 * seconds} s and a batch "
        f"{4 * seconds} s, for {verl.response} tokens at 10 a second"
    )


def agent(verl: VerlSettings) -> Iterator[Setting]:
    turns = f"{ROLLOUT}.multi_turn"
    tools = verl.first(f"{turns}.tool_config_path", "data.tool_config_path")
    loop = str(verl[f"{ROLLOUT}.agent.default_agent_loop"])
    multi = bool(verl[f"{turns}.enable"]) or bool(tools) or loop == "tool_agent"
    if verl.has(f"{ROLLOUT}.agent.default_agent_loop") and loop not in ("single_turn_agent", "tool_agent"):
        verl.lose(
            f"{ROLLOUT}.agent.default_agent_loop",
            "write it as an AgentLoopBase and set agent.loop to FILE.py:Class; "
            f"{'tool_agent' if multi else 'single_turn'} is used instead",
        )
    yield "agent.loop", "tool_agent" if multi else "single_turn"
    by_assistant, by_user = (verl[f"{turns}.max_{side}_turns"] for side in ("assistant", "user"))
    # verl counts the results of tools as the user's turns; the model answers the last of them.
    bounds = [*([int(by_assistant)] if by_assistant else []), *([int(by_user) + 1] if by_user else [])]
    yield "agent.max_turns", min(bounds) if bounds else (MAX_TURNS if multi else 1)
    if multi and not bounds:
        verl.note(f"verl bounds no turns; an episode always has a bound here, and agent.max_turns is {MAX_TURNS}")
    if tools:
        file = Path(str(tools)).expanduser()
        yield "tools", str(file)
        if not file.is_file():
            verl.note(f"{file} is not here: its tools are read when the run starts")
        if not verl.has(f"{turns}.max_tool_response_length"):
            verl.note("a tool's result is cut to 256 characters by verl, here to max_output_chars of each tool (2000)")
    if multi:
        yield "agent.settings.max_calls_per_turn", verl[f"{turns}.max_parallel_calls"]
        parser = PARSERS.get(verl[f"{turns}.format"])
        if parser is None:
            verl.lose(f"{turns}.format", "choose agent.parser (page 'Tools and parsers')")
        else:
            yield "agent.parser", parser


def sampling(verl: VerlSettings) -> Iterator[Setting]:
    top_p, top_k = verl[f"{ROLLOUT}.top_p"], verl[f"{ROLLOUT}.top_k"]
    if top_p < 1:
        yield "agent.top_p", top_p
    if top_k > 0:
        yield "agent.top_k", top_k
    if top_p < 1 or top_k > 0:
        yield "rollout.truncated_sampling", True
        verl.note(
            "top_p and top_k are kept, and rollout.truncated_sampling allows them: the gradient is biased, as in verl"
        )


def reward(verl: VerlSettings) -> Iterator[Setting]:
    path = verl.first("reward.custom_reward_function.path", "custom_reward_function.path")
    name = verl.first("custom_reward_function.name", "reward.custom_reward_function.name")
    yield "agent.reward", f"{Path(path).expanduser()}:{name}" if path else "by_data_source"
    for section in ("reward_model", "reward.reward_model"):
        for key in (f"{section}.model.path", f"{section}.model_path"):
            if verl[f"{section}.enable"] and verl.has(key):
                verl.lose(key, "the model of `penstock reward-server`")
    # Two places in which DAPO's shaping has been.
    for section in ("overlong_buffer_cfg", "overlong_buffer"):
        if verl.matching(f"{section}.enable"):
            yield "trainer.overlong.length", int(verl.matching("reward_kwargs.max_resp_len") or verl.response)
            yield "trainer.overlong.buffer", verl.matching(f"{section}.len") or 0
            yield "trainer.overlong.penalty", verl.matching(f"{section}.penalty_factor") or 1.0
            if not path:
                verl.note(
                    "a wrong answer is 0 here and -1 in verl's math_dapo, so that the penalty weighs more: for -1 set "
                    "agent.rewards.sources.math_dapo='{name: maths, settings: {wrong: -1}}', with your data_source"
                )


def engine_arguments(verl: VerlSettings) -> Iterator[Setting]:
    engine = verl[f"{ROLLOUT}.name"]
    memory = verl.first(f"{ROLLOUT}.standalone_gpu_memory_utilization", f"{ROLLOUT}.gpu_memory_utilization")
    arguments = {
        "tensor_model_parallel_size": (tensor_of(verl), "tensor_parallel_size", "tp_size"),
        "pipeline_model_parallel_size": (
            verl[f"{ROLLOUT}.pipeline_model_parallel_size"],
            "pipeline_parallel_size",
            "pp_size",
        ),
        "gpu_memory_utilization": (memory, "gpu_memory_utilization", "mem_fraction_static"),
        "enforce_eager": (bool(verl[f"{ROLLOUT}.enforce_eager"]), "enforce_eager", "disable_cuda_graph"),
        "max_num_batched_tokens": (
            verl[f"{ROLLOUT}.max_num_batched_tokens"],
            "max_num_batched_tokens",
            "chunked_prefill_size",
        ),
    }
    for name, (value, of_vllm, of_sglang) in arguments.items():
        if engine == "vllm":
            yield f"rollout.vllm_args.{of_vllm}", value
        elif engine == "sglang":
            yield f"rollout.sglang_args.{of_sglang}", value
            for key in (name, f"standalone_{name}"):
                verl.name(f"{ROLLOUT}.{key}", f"rollout.sglang_args.{of_sglang}")
        elif verl.has(f"{ROLLOUT}.{name}"):
            verl.lose(f"{ROLLOUT}.{name}", f"the engine {engine} has no such setting")


def tensor_of(verl: VerlSettings) -> int:
    return int(verl[f"{ROLLOUT}.tensor_model_parallel_size"])


def placement(verl: VerlSettings) -> Iterator[Setting]:
    """GPUs that train and GPUs that sample are other ones here; a colocated run's are halved."""
    trains = int(verl["trainer.nnodes"]) * int(verl["trainer.n_gpus_per_node"])
    per_server = tensor_of(verl) * int(verl[f"{ROLLOUT}.pipeline_model_parallel_size"])
    samples: int | None = None  # GPUs of rollouts alone
    for section in (ROLLOUT, "rollout"):
        nodes, gpus = verl[f"{section}.nnodes"], verl[f"{section}.n_gpus_per_node"]
        if nodes:
            samples = int(nodes) * int(gpus or verl["trainer.n_gpus_per_node"])
    if verl.v1_mode == "colocate_async":
        yield "placement.colocated", True
        yield "trainer.ranks", trains
        yield "rollout.servers", max(1, trains // per_server)
        yield from _replicas(verl, trains)
        return
    lends = verl.v1_mode == "separate_async" and verl["trainer.v1.separate_async.hybrid_rollout.enable_switch"]
    if lends:
        yield "placement.lend", True
    if samples is None:
        whole, samples = trains, max(1, trains // 2)
        trains = samples
        share = f"placement.colocated=true trainer.ranks={whole} rollout.servers={max(1, whole // per_server)}"
        verl.note(
            f"verl samples and trains on the same GPUs; here {trains} train and {samples} sample (penstock simulate"
            f" shows a better split)"
            + (f". To share them as in verl: {share}" if _strategy(verl) != "megatron" else "")
        )
    yield "trainer.ranks", trains
    yield "rollout.servers", max(1, samples // per_server)
    yield from _replicas(verl, trains)
    if int(verl["trainer.nnodes"]) > 1 or samples + trains > int(verl["trainer.n_gpus_per_node"]):
        apart = f"{'placement.lend=false ' if lends else ''}rollout.servers=0"
        verl.note(
            f"{trains} GPUs train and {samples} sample; if one machine has fewer than {samples + trains}: {apart} here"
            " and `penstock rollout` there, see the page 'Launching'"
        )


def _replicas(verl: VerlSettings, ranks: int) -> Iterator[Setting]:
    """HSDP: verl counts the ranks that share one set of weights, here the sets are counted."""
    key = f"{ACTOR}.fsdp_config.fsdp_size"
    size = int(verl[key])
    if 0 < size < ranks and ranks % size == 0:
        yield "trainer.parallel.replicate", ranks // size
    elif 0 < size < ranks:
        verl.lose(key, f"it does not divide trainer.ranks, {ranks}: all ranks share one set of weights")


def engine(verl: VerlSettings) -> Iterator[Setting]:
    strategy = _strategy(verl)
    fsdp = strategy in ("fsdp", "fsdp2")
    if not fsdp and strategy != "megatron":
        verl.lose(f"{ACTOR}.strategy", f"{strategy} is not here; fsdp is used instead")
    yield "trainer.engine", "megatron" if strategy == "megatron" else "fsdp"
    dtype = DTYPES.get(str(verl[f"{ACTOR}.fsdp_config.dtype"]))
    if dtype is None:
        verl.lose(f"{ACTOR}.fsdp_config.dtype", "trainer.dtype is bfloat16 or float32; bfloat16 is used instead")
    yield "trainer.dtype", dtype or "bfloat16"
    of_weights = ("fsdp_config.param_offload", "fsdp_config.offload_policy", "megatron.param_offload")
    of_moments = ("fsdp_config.optimizer_offload", "megatron.optimizer_offload")
    whole, moments = (any([verl[f"{ACTOR}.{part}"] for part in parts]) for parts in (of_weights, of_moments))
    yield "trainer.offload", whole or ("optimizer" if moments else False)
    yield "trainer.parallel.context", verl.context
    if strategy == "megatron":
        for theirs, ours in (("tensor_model", "tensor"), ("pipeline_model", "pipeline"), ("expert_model", "expert")):
            yield f"trainer.parallel.{ours}", int(verl[f"{ACTOR}.megatron.{theirs}_parallel_size"])


def _strategy(verl: VerlSettings) -> str:
    return "megatron" if verl["model_engine"] == "megatron" else str(verl[f"{ACTOR}.strategy"])


def packs(verl: VerlSettings) -> Iterator[Setting]:
    """A pack is shared by the ranks of trainer.parallel.context; verl's number of tokens is that of each GPU."""
    by_tokens, tokens = bool(verl[f"{ACTOR}.use_dynamic_bsz"]), f"{ACTOR}.ppo_max_token_len_per_gpu"
    parallel = max(1, int(verl["trainer.nnodes"]) * int(verl["trainer.n_gpus_per_node"]) // verl.context)
    rows = {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1, f"{ACTOR}.ppo_micro_batch_size": parallel}
    counts = [] if by_tokens else [key for key in rows if verl[key]]
    for key in set(rows) - set(counts[:1]):
        verl.leave(key, "use_dynamic_bsz: verl counts tokens" if by_tokens else "not used")
    if not counts:
        yield "trainer.micro_batch_tokens", int(verl[tokens]) * verl.context
        return
    verl.leave(tokens, "without use_dynamic_bsz verl counts rows")
    per_gpu = max(1, int(verl[counts[0]]) // rows[counts[0]])
    yield "trainer.micro_batch_tokens", per_gpu * (int(verl["data.max_prompt_length"]) + verl.response)


def lora(verl: VerlSettings) -> Iterator[Setting]:
    if not verl[f"{MODEL}.lora_rank"]:
        return
    yield "trainer.lora.rank", verl[f"{MODEL}.lora_rank"]
    yield "trainer.lora.alpha", verl[f"{MODEL}.lora_alpha"]
    targets = verl[f"{MODEL}.target_modules"]
    yield "trainer.lora.targets", targets if isinstance(targets, str) else list(targets)


RUN_RULES: tuple[Callable[[VerlSettings], Iterator[Setting]], ...] = (
    *(leaving, sinks, model, data, sizes, lengths, deadlines, agent, sampling, reward),
    *(engine_arguments, placement, engine, packs, lora),
)
