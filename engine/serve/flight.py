"""A launched step whose tokens may still be on their way."""

from dataclasses import dataclass, field

import torch

from engine.serve import logprobs
from engine.serve.device_sampler import check_drawn


@dataclass
class Flight:
    """A step on its way: launched, its tokens perhaps not computed yet."""

    scheduled: list
    counts: list[int]  # tokens to come for each scheduled request
    ids: torch.Tensor  # [L] i64, where they will be, on the device
    host_ids: torch.Tensor  # [L], and on the host, once `event` has passed
    event: object = None
    rows: list = field(default_factory=list)  # (request, output position) of each token; only if somebody needs it
    known: dict[int, int] = field(default_factory=dict)  # tokens that the host has sampled itself, by place
    record: tuple | None = None  # (logits, prompt_spans of the batch) for log-probabilities
    vocab: int = 0
    size: int = 0  # of the decode step's packed numbers; 0: it was built anew
    held: list = field(default_factory=list)  # requests that ended meanwhile: their blocks may still be written

    def wait(self) -> None:
        """Until the tokens are on the host."""
        if self.event is not None:
            self.event.synchronize()

    def sampled(self) -> list[int]:
        """Wait, and give all tokens, those of the host included."""
        self.wait()
        ids = self.host_ids.tolist()
        for i, token in self.known.items():
            ids[i] = token
        return ids

    def drawn(self) -> list[int]:
        """Wait, and give all tokens in order; ValueError if one was drawn from nothing."""
        ids = self.sampled()
        check_drawn(ids, self.vocab)
        return ids

    def tokens(self) -> list[list[int]]:
        """Wait, and give each scheduled request its tokens."""
        ids = self.drawn()
        if self.record is not None:
            (logits, prompt_spans), self.record = self.record, None
            logprobs.record(logits, self.rows, ids[: len(self.rows)], prompt_spans)
        if self.size:  # one for each, as in most steps
            return [[token] for token in ids]
        rest = iter(ids)
        return [[next(rest) for _ in range(count)] for count in self.counts]
