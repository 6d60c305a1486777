"""What arrives, and when: the requests of a trace, with made-up tokens that share what the originals share."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace.

    at: seconds of the virtual clock; with `after`, seconds after the end of that request (its index in the trace).
    prompt: runs of (token, count). Equal runs at the beginning of two prompts are a shared prefix.
    num_decode_tokens: length of the answer, which is that many times `token`.

    Every request has a token of its own, its index, and whatever is shared has a negative one. One token repeated is
    enough: a block's hash covers all blocks before it, so only what is equal from the first token on is found again.
    """

    at: float
    prompt: tuple[tuple[int, int], ...]
    num_decode_tokens: int
    token: int
    after: int | None = None
    priority: int = 0

    @property
    def num_prefill_tokens(self) -> int:
        return sum(count for _, count in self.prompt)

    def prompt_token_ids(self) -> list[int]:
        return [token for token, count in self.prompt for token in [token] * count]


def shared(number: int) -> int:
    """The token of the shared prefix of that number, 0 and up; no request's own."""
    return -1 - number
