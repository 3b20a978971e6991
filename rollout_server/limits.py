"""What every engine refuses in the same words: contexts that are too long, ids that the model does not have."""

from __future__ import annotations

from penstock.rollout_server.protocol import EngineError, EngineInfo, GenerateRequest, Sampling


class BadRequest(EngineError):
    """The request can never be served, here or elsewhere. `field` names what is wrong in it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}", retryable=False)
        self.field = field


def fit_request(request: GenerateRequest, info: EngineInfo) -> GenerateRequest:
    """The request with `max_new_tokens` cut to what the context length leaves. Raises `BadRequest`."""
    ids = request.token_ids
    if not ids:
        raise BadRequest("token_ids", "is empty; an engine needs at least one token to go on from")
    if min(ids) < 0 or max(ids) >= info.vocab_size:
        wrong = next(i for i, token in enumerate(ids) if not 0 <= token < info.vocab_size)
        raise BadRequest(f"token_ids.{wrong}", f"{ids[wrong]} is outside the vocabulary of {info.vocab_size}")
    if request.images and not info.images:
        raise BadRequest("images", f"the {info.name} engine with this model takes none")
    room = info.max_model_len - len(ids)
    if room < 1:
        raise BadRequest(
            "token_ids", f"{len(ids)} tokens leave no room to answer: rollout.max_model_len is {info.max_model_len}"
        )
    if room >= request.sampling.max_new_tokens:
        return request
    return request.model_copy(update={"sampling": request.sampling.model_copy(update={"max_new_tokens": room})})


def refuse_truncation(sampling: Sampling) -> None:
    """Raises `BadRequest` for sampling that leaves out part of the policy: its gradient would be of another policy."""
    mend = "leave it at {}, or set rollout.truncated_sampling: true if the bias of the policy gradient is wanted"
    if sampling.top_p < 1.0:
        raise BadRequest("sampling.top_p", f"{sampling.top_p:g} truncates the policy; {mend.format(1)}")
    if sampling.top_k > 0:
        raise BadRequest("sampling.top_k", f"{sampling.top_k} truncates the policy; {mend.format(-1)}")
