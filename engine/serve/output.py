"""What a step tells the caller about a request."""

from engine.serve import logprobs
from engine.serve.request import Request


class RequestOutput:
    """What one step did for one request.

    request: whose it is.  finished.  num_new: tokens of this step.
    num_output_tokens: so far, these included.  num_preemptions: so far.
    Everything else is read from the request when asked for: a copy of all tokens in every step would make an output of
    n tokens cost n * n. What an output says never changes all the same: tokens are only ever added behind those it
    counts, and a finished request stays as it is. It keeps its request alive.
    """

    __slots__ = ("request", "num_new", "finished", "num_output_tokens", "num_preemptions")

    def __init__(self, request: Request, num_new: int):
        self.request = request
        self.num_new = num_new
        self.finished: bool = request.status.finished
        self.num_output_tokens = request.num_output_tokens - request.num_placeholders
        self.num_preemptions = request.num_preemptions

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def new_token_ids(self) -> list[int]:
        """Those of this step."""
        end = self.request.num_prompt_tokens + self.num_output_tokens
        return self.request.token_ids[end - self.num_new : end]

    @property
    def output_token_ids(self) -> list[int]:
        """All so far, as a list of the caller's own."""
        start = self.request.num_prompt_tokens
        return self.request.token_ids[start : start + self.num_output_tokens]

    @property
    def finish_reason(self) -> str | None:
        """ "stop", "length" or "abort"; None while it goes on."""
        return self.request.status.value if self.finished else None

    @property
    def stop_reason(self) -> int | None:
        """The stop id that ended it; None for EOS and length."""
        return self.request.stop_reason if self.finished else None

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens adopted from the prefix cache at first admission."""
        return self.request.num_cached_tokens or 0

    @property
    def parent_id(self) -> str | None:
        """Of n > 1 samples: the id given to add_request."""
        return self.request.extra.get("parent", (None, 0))[0]

    @property
    def index(self) -> int:
        """Which of the n samples this is."""
        return self.request.extra.get("parent", (None, 0))[1]

    @property
    def logprobs(self) -> list[dict[int, float]] | None:
        """For each output token so far."""
        return logprobs.output_logprobs(self.request, self.num_output_tokens)

    @property
    def prompt_logprobs(self) -> list[dict[int, float] | None] | None:
        """For each prompt token; None for the first."""
        return logprobs.prompt_logprobs(self.request)

    def __repr__(self) -> str:
        end = f", {self.finish_reason}" if self.finished else ""
        return f"RequestOutput({self.request_id!r}, new {self.new_token_ids}, {self.num_output_tokens} in all{end})"
