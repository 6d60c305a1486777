"""`run.py generate`: text from a model, several prompts at once through the core."""

import sys
import time
from dataclasses import dataclass, field

import torch

from engine.exercises import registry
from engine.milestones.precision import choose_dtype
from engine.milestones.workload import choose_device, launch_options
from engine.models.chat import chat_text
from engine.models.known import resolve
from engine.models.loading import load
from engine.serve.config import EngineConfig
from engine.serve.detokenize import Detokenizer
from engine.serve.engine import EngineCore
from engine.serve.request import SamplingParams


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclass
class Sample:
    """One text on its way out: what is decoded but not yet written, and its measures."""

    heading: str
    detokenizer: Detokenizer
    pending: str = ""
    finished: bool = False
    num_tokens: int = 0
    num_cached: int = 0
    first_token: float | None = None
    reason: str | None = None


@dataclass
class Writer:
    """Writes samples one after the other: the first unfinished one as it comes, those behind it when it is done."""

    samples: dict[tuple[str, int], Sample]
    stream: bool
    out: object = field(default_factory=lambda: sys.stdout)

    def __post_init__(self):
        self._queue = list(self.samples.values())
        self._begun = False

    def flush(self) -> None:
        """Write what may be written now."""
        while self._queue and (self.stream or self._queue[0].finished):
            sample = self._queue[0]
            if not self._begun:
                self.out.write(sample.heading)
                self._begun = True
            self.out.write(sample.pending + "\n" * sample.finished)
            sample.pending = ""
            if not sample.finished:
                break
            self._queue.pop(0)
            self._begun = False
        self.out.flush()


def main(args) -> int:
    if not args.prompt:
        raise ValueError("--prompt TEXT is missing")
    if args.threads is not None and args.threads < 1:
        raise ValueError(f"--threads must be at least 1, got {args.threads}")
    params = SamplingParams(
        max_tokens=args.max_tokens, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p,
        ignore_eos=args.ignore_eos, n=args.n,
    )  # fmt: skip
    config = EngineConfig(attention_backend=args.backend or "auto", seed=args.seed, **launch_options(args))
    device = choose_device(args.device)
    if args.threads:
        torch.set_num_threads(args.threads)
    registry.require_all_exercises()
    notes = [registry.who_wrote()]
    folder = resolve(args.model)
    model, tokenizer = load(folder, choose_dtype(args.dtype, notes.append, device), device)
    if tokenizer is None:
        raise ValueError(f"{folder}: no tokenizer.json to read text with")
    prompts = [encode(folder, tokenizer, text, args.chat) for text in args.prompt]
    core = EngineCore(model, config, eos_token_id=model.cfg.eos_token_id)
    samples = {}
    for i, (text, token_ids) in enumerate(zip(args.prompt, prompts, strict=True)):
        core.add_request(str(i), token_ids, params)
        for j in range(args.n):
            number = f"[{i + 1}]\n" if args.n == 1 else f"[{i + 1}, sample {j + 1}]\n"
            alone = len(prompts) * args.n == 1
            heading = ("" if alone else number) + ("" if args.chat else text)
            samples[str(i), j] = Sample(heading, Detokenizer(tokenizer, token_ids))
    stream = sys.stdout.isatty() if args.stream is None else args.stream
    say("\n".join(notes))  # not before: bad input is one line
    seconds = run(core, samples, Writer(samples, stream))
    report(samples, prompts, seconds)
    return 0


def encode(folder, tokenizer, text: str, chat: bool) -> list[int]:
    """The token ids of a prompt; a chat template writes its special tokens itself."""
    if chat:
        return tokenizer.encode(chat_text(folder, [{"role": "user", "content": text}]), add_special_tokens=False).ids
    return tokenizer.encode(text).ids


def run(core: EngineCore, samples: dict[tuple[str, int], Sample], writer: Writer) -> float:
    """All requests of the core to their end, text out as it comes; the seconds that took."""
    begin = time.perf_counter()
    while core.has_unfinished:
        for output in core.step():
            sample = samples[output.parent_id or output.request_id, output.index]
            if sample.first_token is None:
                sample.first_token = time.perf_counter() - begin
            sample.pending += sample.detokenizer.add(output.new_token_ids)
            sample.num_tokens += len(output.new_token_ids)
            sample.num_cached, sample.finished = output.num_cached_tokens, output.finished
            if output.finished:
                sample.pending += sample.detokenizer.finish()
                sample.reason = output.finish_reason
        writer.flush()
    return time.perf_counter() - begin


def report(samples: dict, prompts: list[list[int]], seconds: float) -> None:
    """Measures, to stderr."""
    for (i, j), sample in samples.items():
        name = f"prompt {int(i) + 1}" + (f", sample {j + 1}" if len(samples) > len(prompts) else "")
        say(
            f"{name}: {len(prompts[int(i)])} tokens in, {sample.num_cached} of them from the prefix cache, "
            f"{sample.num_tokens} out ({sample.reason}), first token after {sample.first_token * 1000:.0f} ms"
        )
    total = sum(sample.num_tokens for sample in samples.values())
    say(f"{total} tokens in {seconds:.2f} s: {total / seconds:.1f} tok/s")
