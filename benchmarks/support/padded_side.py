"""What is written first over a transformers model: rows of a micro-batch padded to its longest, logits of them all."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from benchmarks.support import train_side
from benchmarks.support.meter import Meter
from benchmarks.support.train_side import Done, Settings
from benchmarks.support.work import Work

PAD = 0


class PaddedSide:
    """Rows of similar length share a micro-batch, which needs the least padding."""

    def __init__(self, settings: Settings) -> None:
        self._rows = settings.micro_rows
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._low = torch.bfloat16 if settings.dtype == "bfloat16" else None
        model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
        self._model = model.eval().to(self._device)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=train_side.LEARNING_RATE, betas=train_side.BETAS, weight_decay=0.0
        )
        self._micro_batches: list[list[int]] = []

    def load(self, work: Work) -> None:
        self._work = work
        order = sorted(range(len(work.lengths)), key=lambda index: work.lengths[index])
        self._micro_batches = [order[start : start + self._rows] for start in range(0, len(order), self._rows)]

    def step(self, *, memory: bool = False) -> Done:
        computed = 0
        with Meter(memory=memory) as meter:
            advantages = self._work.advantages()
            for rows in self._micro_batches:
                ids, sampled = self._padded(rows)
                weights = torch.tensor([advantages[row] for row in rows], device=self._device)
                self._loss(ids, sampled, weights).backward()
                computed += ids.numel()
            norm = nn.utils.clip_grad_norm_(self._model.parameters(), train_side.MAX_GRAD_NORM)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        return Done(meter.seconds, meter.cpu_s, float(norm), meter.peak_bytes, computed)

    def close(self) -> None:
        """Nothing is held outside of this process."""

    def _padded(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        """(ids [R, L], bool [R, L] whether a token was sampled), padded on the right."""
        longest = max(self._work.lengths[row] for row in rows) + self._work.prompt
        ids = torch.full((len(rows), longest), PAD)
        for place, row in enumerate(rows):
            own = torch.from_numpy(self._work.row(row))
            ids[place, : len(own)] = own
        sampled = ids != PAD
        sampled[:, : self._work.prompt] = False
        return ids.to(self._device), sampled.to(self._device)

    def _loss(self, ids: Tensor, sampled: Tensor, advantages: Tensor) -> Tensor:
        """Share of this micro-batch in the mean over all sampled tokens of the batch."""
        with torch.autocast(self._device.type, self._low, enabled=self._low is not None):
            logits = self._model(input_ids=ids, attention_mask=ids != PAD, use_cache=False).logits[:, :-1]
        logits = logits.float()
        logprobs = logits.gather(-1, ids[:, 1:, None]).squeeze(-1) - logits.logsumexp(-1)
        ratio = (logprobs - logprobs.detach()).exp()
        clipped = ratio.clamp(1 - train_side.CLIP_LOW, 1 + train_side.CLIP_HIGH)
        gain = torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
        return -(gain * sampled[:, 1:]).sum() / sum(self._work.lengths)
