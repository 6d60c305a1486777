"""The core: requests in, tokens out, one `step` at a time."""

import random
import time
from dataclasses import replace
from pkgutil import resolve_name

from engine.exercises import exercise, fill
from engine.serve.blocks import BlockManager
from engine.serve.config import EngineConfig
from engine.serve.output import RequestOutput
from engine.serve.queue import QueueFullError
from engine.serve.recovery import Atomic
from engine.serve.request import Request, SamplingParams, Status, is_number, is_plain_key  # noqa: F401 (check_stop)
from engine.serve.runner import make_runner
from engine.serve.scheduler import Scheduler
from engine.serve.sizing import block_bytes, num_pool_blocks


class EngineCore:
    """Serves many requests with one model: paged pool, prefix cache, one scheduler, flat batches.

    model: as `engine.models.loading.load` returns it.  eos_token_id: an id, several, or None for no end of sequence.
    sampler: called with (logits [L, V], rows) like SimpleSampler.
    ValueError if the configuration or eos_token_id does not suit, or memory holds not even one block.
    `add_request`, `abort_request` and `step` are atomic: what raises in them has not happened (see `Atomic`).
    """

    block_manager = BlockManager

    def __new__(cls, model, config=None, *args, **kwargs):
        if cls is EngineCore and config is not None and config.async_scheduling:
            cls = resolve_name("engine.serve.steady:SteadyCore")
        return super().__new__(cls)

    def __init__(self, model, config: EngineConfig | None = None, eos_token_id=None, sampler=None):
        self.config = config or EngineConfig()
        for token in eos_token_id if isinstance(eos_token_id, (tuple, list, set, frozenset)) else [eos_token_id]:
            if token is not None and not isinstance(token, int):
                raise ValueError(f"eos_token_id must be an int, several, or None, got {eos_token_id!r}")
        self.eos_token_id = eos_token_id
        self.vocab_size = model.cfg.vocab_size
        limit = model.cfg.max_position_embeddings
        self.max_model_len = self.config.max_model_len or limit
        if self.max_model_len > limit:
            raise ValueError(f"max_model_len {self.max_model_len} exceeds the model's {limit} positions")

        num_blocks = num_pool_blocks(model, self.config, self.max_model_len)
        num_host_blocks = 0
        if self.config.preemption_mode == "swap":
            one = block_bytes(model.cfg, self.config.block_size, next(model.parameters()).dtype)
            num_host_blocks = min(self.config.swap_space_bytes // one, self.config.max_num_seqs * num_blocks)
        self.blocks = self.block_manager(num_blocks, self.config.block_size, self.config.enable_prefix_caching)
        self.scheduler = Scheduler(self.config, self.blocks, num_host_blocks)
        self.runner = make_runner(model, self.config, num_blocks, num_host_blocks, sampler, self.max_model_len)

        self.num_steps = self.num_scheduled_tokens = self.num_preemptions = 0
        self.atomic = Atomic(self)
        self._seeds = random.Random(self.config.seed)
        self.children: dict[str, dict[str, None]] = {}  # live samples of an id given with n > 1

    # -- adding and aborting

    def add_request(
        self, request_id, prompt_token_ids, params=None, priority=0, cache_key=(), arrival_time=None
    ) -> None:
        """Queue a prompt (with params.n > 1: its n samples, under ids of their own with parent_id).

        ValueError, with the engine untouched: empty prompt, token outside the vocabulary, id in use, too long for
        max_model_len or for the pool, parameters that do not fit the model, a priority or arrival_time that is no
        number, a cache_key that is no tuple of plain values. QueueFullError, a ValueError, if they would be more than
        max_waiting in the queue. Whoever was admitted once is never refused: the preempted return to a full queue.
        """
        params = SamplingParams() if params is None else params
        prompt_token_ids = list(prompt_token_ids)
        self._check(request_id, prompt_token_ids, params)
        if arrival_time is None:
            arrival_time = time.monotonic()
        if type(cache_key) is not tuple or not is_plain_key(cache_key):
            raise ValueError(f"request {request_id!r}: cache_key must be a tuple of plain values, got {cache_key!r}")
        for name, value in (("priority", priority), ("arrival_time", arrival_time)):
            if not is_number(value):
                raise ValueError(f"request {request_id!r}: {name} must be a finite number, got {value!r}")

        def make(name, its_params):
            return Request(
                name, prompt_token_ids, its_params, self.eos_token_id, priority, arrival_time, cache_key
            )

        names = [request_id] if params.n == 1 else [f"{request_id}#{i}" for i in range(params.n)]
        for name in names:
            self.scheduler.check_addable(make(name, params))
        if not self._has_room(params.n):
            raise QueueFullError(
                f"request {request_id!r}: {self.scheduler.num_waiting} requests are waiting, and {params.n} more would "
                f"exceed max_waiting {self.config.max_waiting}"
            )
        if params.seed is None:
            params = replace(params, seed=self._seeds.getrandbits(63))
        with self.atomic:
            for i, name in enumerate(names):
                request = make(name, params if params.n == 1 else params.child(i))
                self.atomic.before.append((request, None))
                if params.n > 1:
                    request.extra["parent"] = request_id, i
                    self.children.setdefault(request_id, {})[name] = None
                self.scheduler.add(request)

    def _check(self, request_id, prompt_token_ids, params) -> None:
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, got {params!r}")
        if request_id in self.children or request_id in self.scheduler.requests:
            raise ValueError(f"request id {request_id!r} is in use")
        if not prompt_token_ids:
            raise ValueError(f"request {request_id!r}: the prompt is empty")
        for kind, ids in (("prompt token", prompt_token_ids), ("stop token", params.stop_token_ids)):
            for token in ids:
                if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.vocab_size:
                    raise ValueError(
                        f"request {request_id!r}: {kind} {token!r} is no id of the vocabulary [0, {self.vocab_size})"
                    )
        total = len(prompt_token_ids) + params.max_tokens
        if total > self.max_model_len:
            raise ValueError(
                f"request {request_id!r}: prompt {len(prompt_token_ids)} + max_tokens {params.max_tokens} = {total} "
                f"tokens exceeds max_model_len {self.max_model_len}"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self.vocab_size:
                raise ValueError(f"request {request_id!r}: {name} {getattr(params, name)} exceeds the vocabulary")

    def _has_room(self, count: int) -> bool:
        bound = self.config.max_waiting
        return bound is None or self.scheduler.num_waiting + count <= bound

    def abort_request(self, request_id) -> list[RequestOutput]:
        """End a request, or all samples of a parent id, now. Returns their last outputs; none for an unknown id."""
        outputs = []
        with self.atomic:
            for name in list(self.children.get(request_id, [request_id])):
                request = self.scheduler.requests.get(name)
                if request is not None:
                    self.atomic.before.append((request, request.num_tokens - request.num_placeholders))
                    self._abort(request)
                    self._forget(request)
                    outputs.append(RequestOutput(request, 0))
            return outputs

    def _abort(self, request) -> None:
        self.scheduler.finish(request, Status.FINISHED_ABORTED)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached K/V, after the weights changed, say. False and unchanged while a request is unfinished."""
        return not self.has_unfinished and self.blocks.reset_prefix_cache()

    def forget_flights(self) -> None:
        """What was launched and not read is of no use any more; here nothing ever is."""

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    # -- the loop

    @exercise(31, "The loop")
    def check_stop(self, request, index=-1):
        """Does an output token end its request?  (Your engine: Chapter 31)

        index: which of the request's output tokens, the newest by default; negative ones count from the end. Judge as
        if the output ended with that token.
        In this order:
        1. FINISHED_STOPPED if the token is an end of sequence (request.eos_token_id: an int, several, or None)
           unless params.ignore_eos, or if it is one of params.stop_token_ids; neither while the output has fewer than
           params.min_tokens tokens, the token itself counted. A stop id also goes into request.stop_reason; if it is
           EOS as well, EOS comes first and stop_reason stays None.
        2. FINISHED_LENGTH if the output has reached params.max_tokens, or prompt and output self.max_model_len.
        3. None: it goes on.
        Tokens of the prompt never stop anything.
        """
        raise NotImplementedError

    @exercise(31, "The loop")
    def step(self) -> list[RequestOutput]:
        """Plan, run and commit one step.  (Your engine: Chapter 31)

        All of it inside `with self.atomic:`, which takes care of what breaks off in the middle of 1 or 3.
        1. out = self.scheduler.schedule(). Return [] if out.empty: nothing planned and nobody preempted.
        2. self.runner.swap(out), then sampled = self.runner.execute(out, self.blocks.block_tables): for each
           scheduled request the token ids of its sampled rows ([] in mid-prompt). If either raises anything,
           KeyboardInterrupt too: self.scheduler.undo(out, swapped_out=whether `swap` had returned), and raise it
           again. So a step that fails has not happened, and the next one can go on.
        3. Commit, for each scheduled (request, n): `self.accept(request, n, tokens)` advances num_computed_tokens and
           gives the tokens that hold. Append them one by one, asking `check_stop` after each and dropping the rest
           after a stop. A request that stopped leaves by `self.scheduler.finish(request, status)`. Each request
           admitted in this step needs its host copies no more: `self.scheduler.drop_swap(request)`.
        Returns `self.output(request, new_tokens)` for each request that got tokens, in the order of the batch.
        Also adds 1 to num_steps, out.num_tokens to num_scheduled_tokens and len(out.preempted) to num_preemptions, once
        the step has succeeded.
        """
        raise NotImplementedError

    def accept(self, request, n: int, tokens: list[int]) -> list[int]:
        """Count n scheduled tokens as computed, less the drafts that were wrong; returns the sampled tokens that hold.

        tokens[j] follows the j-th draft, so it holds if all drafts up to there are what was sampled in their place.
        """
        self.atomic.before.append((request, len(request.token_ids)))
        if not request.spec_token_ids:
            request.num_computed_tokens += n
            return tokens
        drafts, request.spec_token_ids = request.spec_token_ids, []
        accepted = tokens[:1]
        for draft, token in zip(drafts, tokens[1:], strict=False):
            if accepted[-1] != draft:
                break
            accepted.append(token)
        request.num_computed_tokens += n - (len(tokens) - len(accepted))
        self.blocks.trim(request, request.num_computed_tokens)
        return accepted

    def output(self, request, new_token_ids: list[int]) -> RequestOutput:
        """The RequestOutput of a request that has just got these tokens, finished or not."""
        if request.first_token_time is None:
            request.first_token_time = time.monotonic()
        if request.status.finished:
            self._forget(request)
        return RequestOutput(request, len(new_token_ids))

    def _forget(self, request) -> None:
        """Note the end of a request, also among the samples of its parent."""
        request.finish_time = time.monotonic()
        parent, _ = request.extra.get("parent", (None, 0))
        if parent is not None:
            del self.children[parent][request.request_id]
            if not self.children[parent]:
                del self.children[parent]

    def stats(self) -> dict:
        """Counters and gauges, as plain values."""
        return {
            "steps": self.num_steps,
            "scheduled_tokens": self.num_scheduled_tokens,
            "running": self.scheduler.num_running,
            "waiting": self.scheduler.num_waiting,
            "preemptions": self.num_preemptions,
            "kv_slots": self.blocks.num_blocks * self.blocks.block_size,
            "kv_usage": self.blocks.usage,
            "prefix_hit_rate": self.blocks.hit_rate,
            "evictions": self.blocks.stats.evictions,
            "seconds": dict(self.runner.seconds),
        }

    # -- convenience

    def generate(self, prompts, params=None) -> list[RequestOutput]:
        """Run prompts (lists of token ids) to the end; params: one for all, or one each.

        Returns the final outputs in order, n of them for a prompt with n samples. RuntimeError while other requests are
        unfinished: their outputs would have nobody to go to. If anything fails, these prompts are aborted first.
        More prompts than max_waiting are fine: they enter the queue as it empties.
        """
        if self.has_unfinished:
            raise RuntimeError(f"generate needs an idle engine; {len(self.scheduler.requests)} requests are unfinished")
        prompts = list(prompts)
        each = list(params) if isinstance(params, (list, tuple)) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(each)} params")
        final: dict[str, RequestOutput] = {}
        names, added = [], 0
        try:
            while added < len(prompts) or self.has_unfinished:
                while added < len(prompts) and (
                    self._has_room(getattr(each[added], "n", 1)) or not self.scheduler.num_waiting
                ):
                    name = f"prompt-{added}"
                    self.add_request(name, prompts[added], each[added])
                    names += self.children.get(name, [name])
                    added += 1
                final.update((output.request_id, output) for output in self.step())
        except BaseException:
            for name in list(self.scheduler.requests):
                self.abort_request(name)
            raise
        return [final[name] for name in names]


fill(__name__)
