"""A program with Tinker's own SDK: every call once, its results as JSON. Run by `test_sdk.py`."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from typing import Any

import tinker
import torch
from tinker import types

warnings.simplefilter("ignore")
IDS = [5, 6, 7, 8, 9, 10, 11]
PROMPT = types.ModelInput.from_ints(IDS[:3])


def datum(**inputs: Any) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(IDS[:-1]), loss_fn_inputs={"target_tokens": IDS[1:], **inputs}
    )


def square(data: Any, logprobs: Any) -> Any:
    loss = sum((one**2).sum() for one in logprobs)
    return loss, {"squares:sum": float(loss)}


def main(name: str) -> dict[str, Any]:
    seen: dict[str, Any] = {"warnings": []}
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: seen["warnings"].append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tinker").addHandler(handler)
    with tinker.ServiceClient() as service:
        seen["models"] = [one.model_name for one in service.get_server_capabilities().supported_models]
        model = service.create_lora_training_client(base_model=name, rank=8, seed=1).result()
        supervised = datum(weights=[1.0] * 6)
        losses = []
        for _ in range(3):
            gradients = model.forward_backward([supervised] * 3, "cross_entropy")
            step = model.optim_step(types.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0))
            losses.append(gradients.result().metrics["loss:sum"])
            step.result()
        seen["losses"] = losses
        rl = datum(logprobs=[-2.0] * 6, advantages=[1.0, 0.0, -1.0, 1.0, 0.5, 2.0])
        seen["rl"] = {
            loss: model.forward_backward([rl], loss).result().metrics["loss:sum"]
            for loss in ("importance_sampling", "ppo", "cispo", "dro")
        }
        seen["custom"] = model.forward_backward_custom([supervised], square).result().metrics["squares:sum"]
        model.optim_step(types.AdamParams()).result()
        saved = model.save_state("first").result().path
        sampler = model.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=5, temperature=1.0, seed=3, stop=[])
        sample = sampler.sample(prompt=PROMPT, num_samples=2, sampling_params=params).result()
        first = sample.sequences[0]
        whole = types.ModelInput.from_ints([*IDS[:3], *first.tokens])
        seen["sampled"] = list(first.logprobs)
        seen["computed"] = sampler.compute_logprobs(whole).result()[3:]
        before = model.forward([supervised], "cross_entropy").result().metrics["loss:sum"]
        restored = service.create_training_client_from_state_with_optimizer(saved).result()
        seen["restored"] = [before, restored.forward([supervised], "cross_entropy").result().metrics["loss:sum"]]
        base = service.create_sampling_client(base_model=name).result()
        path = model.save_weights_for_sampler("named").result().path
        named = service.create_sampling_client(model_path=path).result()
        seen["versions"] = [one.compute_logprobs(PROMPT).result()[1:] for one in (base, named, sampler)]
        seen["refused"] = refusal(lambda: model.forward_backward([rl], "stable_reinforce").result())
        seen["failed"] = refusal(lambda: restored.forward([bad()], "cross_entropy").result())
    rest = tinker.RestClient()
    seen["runs"] = len(rest.list_training_runs().result().training_runs)
    seen["checkpoints"] = sorted(
        one.checkpoint_id for one in rest.list_checkpoints(model.model_id).result().checkpoints
    )
    return seen


def bad() -> types.Datum:
    return types.Datum(model_input=types.ModelInput.from_ints([999_999]), loss_fn_inputs={"target_tokens": [1]})


def refusal(call: Any) -> list[str]:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - of any kind: which, is what the test looks at
        return [type(error).__name__, str(error)]
    return []


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(main(sys.argv[1])))
