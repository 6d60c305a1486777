"""Continuous batching in slots: requests join and leave a running batch between any two steps.  (Chapter 24)

Every slot is a fixed row of one static KV cache, and a request owns one slot from its admission to its last token.
The scheduling is Orca's (Yu et al., OSDI 2022); the fixed rows are what chapter 25 and chapter 31 replace.
"""

import operator
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from engine.exercises import exercise, fill
from engine.sampling import sample
from engine.slot_cache import SlotCache


@dataclass(eq=False)
class SlotRequest:
    """One request. `num_computed` of its tokens (prompt, then output) have K/V in row `slot` of the cache.

    Between steps, a request past its prefill has exactly one token without K/V: the newest, the next decode's input.
    """

    request_id: Hashable
    prompt_token_ids: list[int]
    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    generator: torch.Generator | None = None
    ignore_eos: bool = False
    slot: int | None = None  # None while it waits and after it has left
    num_computed: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # "stop", "length" or "abort"

    @property
    def in_prefill(self) -> bool:
        return self.num_computed < len(self.prompt_token_ids)


@dataclass(frozen=True)
class SlotUpdate:
    """One new token of one request; `finish_reason` is set when it was the last."""

    request_id: Hashable
    token_id: int
    finish_reason: str | None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class ContinuousBatchingEngine:
    """Serves many requests at once from `num_slots` cache rows of `slot_len` positions each.

    model:        chapter 17's model: `.cfg`, `.model(input_ids, cache, positions) -> hidden`, `.lm_head`
    chunk_size:   most prompt tokens of one request in one forward
    eos_token_id: None, an id, or a tuple of ids that end a request

    State: `waiting`, a deque of requests in order of arrival; `slots`, a list with the request in each slot or None;
    `requests`, the live ones by id; `cache`; `updates`, tokens that `step` has not returned yet; the counters
    `num_steps` (that computed something) and `num_forward`.
    """

    def __init__(self, model, num_slots=8, slot_len=320, chunk_size=512, eos_token_id=None):
        for name, value in (("num_slots", num_slots), ("slot_len", slot_len), ("chunk_size", chunk_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        cfg, weight = model.cfg, next(model.parameters())
        if slot_len > cfg.max_position_embeddings:
            raise ValueError(f"slot_len {slot_len} exceeds the model's {cfg.max_position_embeddings} positions")
        self.model, self.device, self.vocab_size = model, weight.device, cfg.vocab_size
        self.slot_len, self.chunk_size = slot_len, chunk_size
        self.eos_token_ids = (eos_token_id,) if isinstance(eos_token_id, int) else tuple(eos_token_id or ())
        shape = (cfg.num_hidden_layers, num_slots, cfg.num_key_value_heads, slot_len, cfg.head_dim)
        self.cache = SlotCache(*shape, weight.dtype, weight.device)
        self.waiting: deque[SlotRequest] = deque()
        self.slots: list[SlotRequest | None] = [None] * num_slots
        self.requests: dict[Hashable, SlotRequest] = {}
        self.updates: list[SlotUpdate] = []
        self.num_steps = self.num_forward = 0

    @property
    def kv_slots(self) -> int:
        """Positions that the cache can hold, over all slots."""
        return len(self.slots) * self.slot_len

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def add_request(
        self,
        request_id,
        prompt_token_ids,
        max_tokens=16,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        seed=None,
        ignore_eos=False,
    ):
        """Queue a request. A ValueError names what was wrong, and then the engine has not changed."""
        if request_id in self.requests:
            raise ValueError(f"request id {request_id!r} is in use by a live request")
        prompt = [operator.index(token) for token in prompt_token_ids]
        if not prompt:
            raise ValueError(f"request {request_id!r}: the prompt is empty")
        for i, token in enumerate(prompt):
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"request {request_id!r}: token {i} is {token}, outside 0..{self.vocab_size - 1}")
        if max_tokens < 1:
            raise ValueError(f"request {request_id!r}: max_tokens must be at least 1, got {max_tokens}")
        if len(prompt) + max_tokens > self.slot_len:
            raise ValueError(
                f"request {request_id!r}: {len(prompt)} prompt tokens + max_tokens {max_tokens} do not fit "
                f"a slot of {self.slot_len}"
            )
        if not (0 <= temperature < float("inf") and isinstance(top_k, int) and top_k >= 0 and 0 < top_p <= 1):
            raise ValueError(
                f"request {request_id!r}: impossible temperature {temperature}, top_k {top_k} or top_p {top_p}"
            )
        generator = None if seed is None else torch.Generator(self.device).manual_seed(seed)
        request = SlotRequest(request_id, prompt, max_tokens, temperature, top_k, top_p, generator, ignore_eos)
        self.requests[request_id] = request
        self.waiting.append(request)

    def abort_request(self, request_id) -> bool:
        """Drop a request, waiting or running; its slot is free at once. False if no live request has that id."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        if request.slot is None:
            self.waiting.remove(request)
        self.updates = [update for update in self.updates if update.request_id != request_id]
        self._finish(request, "abort")
        return True

    def generate(self, prompts, max_tokens=16, **params) -> list[list[int]]:
        """Run all prompts to the end; their new tokens, in the order of the prompts. Needs an idle engine.

        max_tokens is one int, or a list with one for each prompt. The other parameters are add_request's and hold for
        every prompt; with a seed, each prompt gets a generator of its own with that seed.
        """
        if self.has_unfinished:
            raise RuntimeError("generate needs an idle engine; use add_request and step while others are being served")
        limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
        outputs = [[] for _ in prompts]
        try:
            for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
                self.add_request(i, prompt, limit, **params)
            while self.has_unfinished:
                for update in self.step():
                    outputs[update.request_id].append(update.token_id)
        finally:  # after an error nothing may stay behind
            for i in range(len(prompts)):
                self.abort_request(i)
        return outputs

    # What a step is made of

    @torch.inference_mode()
    def forward(self, input_ids, positions, view):
        """One pass of input_ids [B, T] at positions [B, T] over the rows of `view`: hidden states [B, T, hidden]."""
        hidden_states = self.model.model(input_ids, cache=view, positions=positions)
        self.num_forward += 1
        return hidden_states

    @torch.inference_mode()
    def pick_tokens(self, requests, last_hidden) -> list[int]:
        """The next token of each request from its last hidden state, last_hidden [B, hidden], as chapter 8 samples."""
        logits = self.model.lm_head(last_hidden).float()  # [B, V]
        tokens = logits.argmax(-1)
        for i, r in enumerate(requests):
            if r.temperature > 0:
                tokens[i] = sample(logits[i : i + 1], r.temperature, r.top_k, r.top_p, r.generator)[0]
        return tokens.tolist()  # the one wait for the device

    def accept(self, request, token):
        """Append a new token to a running request, report it, and give the slot back if that was the last one."""
        request.output_token_ids.append(token)
        if token in self.eos_token_ids and not request.ignore_eos:
            self._finish(request, "stop")
        elif len(request.output_token_ids) == request.max_tokens:
            self._finish(request, "length")
        self.updates.append(SlotUpdate(request.request_id, token, request.finish_reason))

    def _finish(self, request, reason):
        request.finish_reason = reason
        if request.slot is not None:
            self.slots[request.slot] = None
            request.slot = None
        del self.requests[request.request_id]

    @exercise(24, "Admission")
    def admit(self):
        """Give free slots to waiting requests, first come, first served.  (Your engine: Chapter 24)

        Takes requests from the front of `waiting` until no slot is free or nobody waits, whatever else is running. Each
        goes into a slot that is None in `slots`: `slots[i]` becomes the request and its `slot` becomes i. Which of the
        free slots it gets is open, but low slots first keep the active rows together. The cache is not touched.
        Returns the list of admitted requests, in order of arrival; empty if there were none.
        Source: iteration-level scheduling, Orca (OSDI 2022).
        """
        raise NotImplementedError

    @exercise(24, "Prefill, a chunk at a time")
    def prefill_chunk(self, request):
        """Compute the next chunk of one admitted request's prompt in one forward.  (Your engine: Chapter 24)

        The chunk is the prompt tokens from `num_computed` on, at most `chunk_size` of them, each at its own position in
        the prompt, in row `request.slot`. The view is as long as the prompt up to the end of the chunk, no longer.
        `num_computed` then counts the chunk's tokens too. It moves last, so that an exception in the forward or while
        sampling leaves the request as it was.
        Returns the first output token (int) if this chunk ends the prompt, else None. Only in the first case does
        anything go through the LM head, and then one row: the chunk's last. Does not append the token: `step` does.
        Use `cache.view`, `forward` and `pick_tokens`.
        """
        raise NotImplementedError

    @exercise(24, "Decode, all rows at once")
    def decode(self, requests):
        """The next token of every given request from one forward.  (Your engine: Chapter 24)

        requests: at least one, all past their prefill, in any order. One forward over their rows and no others, T = 1:
        the input of each is its newest output token, whose position is `num_computed` (positions differ from row
        to row). The view is as long as the longest of these requests after the new token, not `slot_len`.
        `num_computed` of each grows by 1, last, so that an exception leaves all of them as they were.
        Returns the new tokens, list of int, in the order of `requests`. Does not append them: `step` does.
        """
        raise NotImplementedError

    @exercise(24, "The step")
    def step(self):
        """Admit, run a chunk of every unfinished prompt, decode all the others once.  (Your engine: Chapter 24)

        1. Admit what fits.
        2. Every running request that is in prefill, old or just admitted, gets one prefill chunk, a forward each.
        3. All requests that were past their prefill when the step began share one decode forward, if there are any.
        So a request gets at most one token in a step: the one after its last chunk or the one of its decode.
        Every token goes through `accept` as soon as its forward is done, so that a later forward that raises
        loses nothing: what was accepted stays in `updates` and the next step returns it.
        Counts 1 in `num_steps`; a step with no request to run counts nothing.
        Returns all of `updates`, list of SlotUpdate, and leaves that list empty.
        """
        raise NotImplementedError


fill(__name__)
