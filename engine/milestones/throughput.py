"""A workload with everything in it, prefill, decode and ends, through our core and through transformers."""

import gc
import random
import time
from dataclasses import asdict, dataclass, field

import torch

from engine.serve.config import EngineConfig
from engine.serve.device_sampler import DeviceSampler
from engine.serve.engine import EngineCore
from engine.serve.request import SamplingParams

PEER = "transformers, continuous batching"
BUDGET = 16_384  # tokens of a step
WARM_UP = 4  # tokens of the requests before the clock runs


@dataclass
class Load:
    """Requests that all come at once; EOS is ignored."""

    prompts: list[list[int]]
    max_tokens: list[int]
    temperature: float
    name: str = ""


@dataclass
class Served:
    """What came of a load, and when: its seconds are those from the first request to the last token."""

    outputs: list[list[int]]
    seconds: float
    finished: int
    more: dict = field(default_factory=dict)


def draw_load(vocab: int, requests: int, low: int, high: int, temperature: float = 0.6) -> Load:
    """Requests of random lengths, prompt and output both uniform in [low, high], as nano-vllm's benchmark has them."""
    rng = random.Random(0)
    prompts = [[rng.randrange(vocab) for _ in range(rng.randint(low, high))] for _ in range(requests)]
    max_tokens = [rng.randint(low, high) for _ in prompts]
    return Load(prompts, max_tokens, temperature, f"{requests} requests, {low}-{high} in and out")


def line_of(load: Load, variant: str, served: Served) -> dict:
    """What is printed; ValueError if it claims to be finished and lacks tokens, or has too many."""
    tokens, asked = sum(map(len, served.outputs)), sum(load.max_tokens)
    whole = served.finished == len(load.prompts)
    if tokens > asked or whole and tokens < asked:
        raise ValueError(f"{variant}: {tokens} tokens came, {asked} were asked for")
    return {
        "workload": load.name, "variant": variant, "output_tokens": tokens, "finished": served.finished,
        "prompt_tokens": sum(map(len, load.prompts)), "seconds": round(served.seconds, 2),
        "tok_s": round(tokens / served.seconds), **served.more,
    }  # fmt: skip


def free_memory() -> None:
    """Give back what nobody uses: a core and its parts know each other, and torch keeps what they had."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run_core(model, load: Load, settings: dict) -> Served:
    longest = max(len(p) + n for p, n in zip(load.prompts, load.max_tokens, strict=True))
    config = EngineConfig(
        max_num_seqs=min(len(load.prompts), 256), max_num_batched_tokens=BUDGET, max_model_len=longest, **settings
    )
    core = EngineCore(model, config, sampler=DeviceSampler())
    core.generate(load.prompts[:4], SamplingParams(max_tokens=WARM_UP, ignore_eos=True))
    core.reset_prefix_cache()
    params = [SamplingParams(max_tokens=n, temperature=load.temperature, ignore_eos=True) for n in load.max_tokens]
    begin, steps = time.perf_counter(), core.num_steps
    outputs = [output.output_token_ids for output in core.generate(load.prompts, params)]
    seconds = time.perf_counter() - begin
    more = {"steps": core.num_steps - steps, "preemptions": core.num_preemptions}
    del core
    free_memory()
    return Served(outputs, seconds, len(outputs), more)


# -- transformers


def check_beside(seconds: float, no_workload: bool = False) -> None:
    """ValueError if transformers cannot run that long, or not at all."""
    if not 0 < seconds < float("inf"):
        raise ValueError(f"--beside must be a number of seconds, got {seconds}")
    if no_workload:
        raise ValueError("--beside is about the workload, and --no-workload leaves that out")
    import_transformers()


def import_transformers():
    try:
        import transformers
        from transformers import ContinuousBatchingConfig  # noqa: F401  not in older ones
    except ImportError as error:
        need = "--beside needs transformers with continuous batching: python -m pip install -r tests/requirements.txt"
        raise ValueError(f"{need} ({error})") from None
    return transformers


def peer(model):
    """transformers' model of the same config around the very same weights; ValueError if it computes something else."""
    transformers = import_transformers()
    transformers.utils.logging.set_verbosity_error()
    fields = {k: v for k, v in asdict(model.cfg).items() if v is not None and k not in ("qk_norm", "dtype")}
    config, weight = transformers.Qwen3Config(**fields), next(model.parameters())
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=weight.dtype, attn_implementation="sdpa")
    theirs.load_state_dict(model.state_dict(), assign=True)
    theirs.tie_weights()
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(config).to(weight.device)  # no weight, so still on meta
    theirs.requires_grad_(False).eval()
    ids = torch.arange(64, device=weight.device)[None] % config.vocab_size
    with torch.no_grad():
        ours, other = model(ids), theirs(ids).logits.float()
    off, bound = float((other - ours).norm() / ours.norm()), 16 * torch.finfo(weight.dtype).eps
    if not off <= bound:
        raise ValueError(f"transformers' logits are off by {off:.2g}, rounding explains {bound:.2g}")
    return theirs


def run_peer(model, load: Load, limit: float) -> Served:
    """transformers on the same load, with our budget and room for all requests: its tokens of `limit` seconds at most.

    As with the core, the pool is made and some requests are served before the clock runs. At the limit it is stopped
    after the step that it is in, and what it has of every request counts, with the time until then.
    """
    transformers, theirs = import_transformers(), peer(model)
    pool = transformers.ContinuousBatchingConfig(max_batch_tokens=min(BUDGET, sum(map(len, load.prompts))))
    block = getattr(pool, "page_size", None) or pool.block_size  # its name up to 5.17
    blocks = sum(-(-(len(p) + n) // block) for p, n in zip(load.prompts, load.max_tokens, strict=True))
    pool.num_blocks = 2 + blocks * 5 // 4  # it admits nobody into the last fifth
    heat = {"do_sample": True, "temperature": load.temperature} if load.temperature else {"do_sample": False}
    config = transformers.GenerationConfig(eos_token_id=-1, top_k=0, top_p=1.0, **heat)
    manager = theirs.init_continuous_batching(config, pool)
    more = {"version": transformers.__version__, "attention": theirs.config._attn_implementation}
    try:
        manager.warmup()
        manager.start()
        for i, prompt in enumerate(load.prompts[:4]):  # backwards: nothing of it is found in the prefix cache
            manager.add_request(prompt[::-1], request_id=f"warm-up {i}", max_new_tokens=WARM_UP)
        collect(manager, min(4, len(load.prompts)), float("inf"))
        begin = time.perf_counter()
        for i, (prompt, n) in enumerate(zip(load.prompts, load.max_tokens, strict=True)):
            manager.add_request(prompt, request_id=str(i), max_new_tokens=n)
        results = collect(manager, len(load.prompts), begin + limit)
        manager.stop(block=True, hard_stop=True)
        ended, finished = time.perf_counter(), len(results)
        while (result := manager.get_result(timeout=1)) is not None:  # the others, as far as they came
            results[result.request_id] = result
            finished += result.error is None
    finally:
        if manager.is_running():
            manager.stop(block=True, hard_stop=True)
    seconds = max((result.lifespan[1] for result in results.values()), default=ended) - begin
    found = (results.get(str(i)) for i in range(len(load.prompts)))  # none of one that had not begun
    outputs = [list(result.generated_tokens) if result else [] for result in found]
    del manager, theirs
    free_memory()
    return Served(outputs, seconds, finished, more)


def collect(manager, count: int, until: float) -> dict:
    """Results by request id: `count` of them, or those that came by then; ValueError if its thread failed."""
    results = {}
    while len(results) < count and (left := until - time.perf_counter()) > 0:
        result = manager.get_result(timeout=min(1, left))
        if result is not None and result.error is not None:
            raise ValueError(f"{PEER}: {result.error}")
        if result is not None:
            results[result.request_id] = result
        elif not manager.is_running():
            raise ValueError(f"{PEER}: its thread ended: {manager.background_thread_status.fatal_error!r}")
    return results
