"""The nouns of the core: what a caller asks for and what the engine knows about one request."""

import hashlib
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waiting again, after it ran
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"

    def __init__(self, value: str):
        self.finished = value in ("stop", "length", "abort")  # kept, since it is asked for every token


@dataclass(frozen=True)
class SamplingParams:
    """What one caller wants; refuses impossible values with ValueError when made.

    max_tokens: output tokens at most.  min_tokens: before so many, EOS and stop ids do not end the request.
    temperature: 0 is greedy.  top_k: 0 is off.  top_p: 1 is off.  seed: None takes one from the engine.
    stop_token_ids: also end the output, which includes them.  ignore_eos: only length and stop ids end it.
    n: samples of the same prompt.  logprobs: log-probabilities of that many most likely tokens with each output
    token (0: the chosen one alone).  prompt_logprobs: the same for each prompt token after the first.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self):
        if not isinstance(self.stop_token_ids, Iterable) or isinstance(self.stop_token_ids, (str, bytes)):
            raise ValueError(f"stop_token_ids must be a tuple of ids, got {self.stop_token_ids!r}")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")
        for name, low in (("max_tokens", 1), ("top_k", 0), ("min_tokens", 0), ("n", 1)):
            value = getattr(self, name)
            if not _is_int(value) or value < low:
                raise ValueError(f"{name} must be an integer of at least {low}, got {value!r}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and (not _is_int(value) or value < 0):
                raise ValueError(f"{name} must be None or an integer of at least 0, got {value!r}")
        if not (is_number(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be a number of at least 0, got {self.temperature!r}")
        if not (is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p!r}")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}")
        if self.seed is not None and not _is_int(self.seed):
            raise ValueError(f"seed must be None or an integer, got {self.seed!r}")

    def child(self, i: int) -> "SamplingParams":
        """The same parameters for the i-th of n samples: n=1 and a seed of its own, derived from seed and i."""
        seed = None if self.seed is None else derive_seed(self.seed, i)
        return replace(self, n=1, seed=seed)


def _is_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value) -> bool:
    """A finite int or float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_plain_key(value) -> bool:
    """What a cache key may hold: None, bool, int, float, str, bytes, and tuples of them."""
    if type(value) is tuple:
        return all(map(is_plain_key, value))
    return value is None or type(value) in (bool, int, float, str, bytes)


def derive_seed(*parts: int) -> int:
    """A 63-bit seed from integers; near inputs give unrelated seeds, the same in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(eq=False, slots=True)  # slots: a step of many requests is mostly reading and writing these
class Request:
    """One prompt on its way through the core.

    token_ids is the whole state: the prompt, then the output.  num_computed_tokens says how many of them have K/V in
    the pool.  Between steps an unfinished running request past its prefill has one uncomputed token, the newest.
    Compared and hashed by identity, so that it can be a dictionary key while it changes.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    eos_token_id: int | tuple[int, ...] | None = None
    priority: int = 0  # lower runs first under the priority policy
    arrival_time: float | None = None
    cache_key: tuple = ()  # what else K/V depends on (tenant, adapter): part of every block hash

    status: Status = field(default=Status.WAITING, init=False)
    token_ids: list[int] = field(init=False)  # beside what else each step touches: fewer cache lines
    num_computed_tokens: int = field(default=0, init=False)
    num_cached_tokens: int | None = field(default=None, init=False)  # adopted at the first admission
    num_preemptions: int = field(default=0, init=False)
    spec_token_ids: list[int] = field(default_factory=list, init=False)  # drafts to verify in the next step
    swapped_out: list[int] | None = field(default=None, init=False)  # host blocks that hold its K/V while preempted
    block_hashes: list[bytes] = field(default_factory=list, init=False)  # of the full blocks of token_ids so far
    num_placeholders: int = field(default=0, init=False)  # newest tokens whose values are still on the device
    stop_reason: int | None = field(default=None, init=False)  # the stop id that ended it; None for EOS and length
    first_token_time: float | None = field(default=None, init=False)
    finish_time: float | None = field(default=None, init=False)
    order: int = field(default=0, init=False)  # order of adding, set by the scheduler
    num_prompt_tokens: int = field(init=False)
    extra: dict = field(default_factory=dict, init=False)  # state of later chapters, by feature

    def __post_init__(self):
        self.prompt_token_ids = list(self.prompt_token_ids)
        self.token_ids = list(self.prompt_token_ids)
        self.num_prompt_tokens = len(self.prompt_token_ids)
        if self.arrival_time is None:
            self.arrival_time = time.monotonic()

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output, drafts not counted."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_tokens_with_spec(self) -> int:
        return len(self.token_ids) + len(self.spec_token_ids)

    def append(self, token_id: int) -> None:
        """Add an output token."""
        self.token_ids.append(token_id)

    def __repr__(self) -> str:
        computed = f"{self.num_computed_tokens}/{self.num_tokens}"
        return f"Request({self.request_id!r}, {self.status.name}, {computed} computed)"
