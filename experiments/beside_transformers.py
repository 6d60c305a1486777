"""Our core beside transformers: the same weights, prompts, dtype and threads, in one run. Needs tests/requirements.txt.

    python -m experiments.beside_transformers [--model tiny|smollm2|random|DIR] [--requests 16] [--repeat 3]
        [--dtype float32] [--width 1536] [--seed 0] [--skip NAME]... [--json]

Compared, greedy, on the workload of chapter 31's milestone, in turns, medians:

- core: EngineCore with the milestone's settings;
- padded: transformers' `generate` on batches of 8 in order of arrival, and on one batch of all: prompts padded on the
  left, each batch goes on until its longest request is done. Only tokens that were asked for count;
- continuous: transformers' continuous batching, with the core's block size, pool and token budget, and prefix sharing;
- one by one: `generate` with its cache on each request alone.

The workload favours the core: `generate` computes the shared opening once for every request, and decodes rows that are
done or padding. The ratio is about both, not about one forward against another. Not compared: sampling, arrival over
time, compiled or quantized models, GPUs, the time to load. No speed is printed unless every engine gives the tokens of
our core in float32; in a shorter dtype, up to near ties (engine/milestones/precision.py). JSON lines on stdout, a table
on stderr (--json: none). Status 1: an engine gave other tokens. OMP_NUM_THREADS sets the threads of all.
"""

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

PADDED = "padded, 8"


class CannotRunError(Exception):
    """An engine that does not work on this machine, with its own message."""


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    for name, default in (("requests", 16), ("repeat", 3), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--width", type=int, help="of the random model")
    parser.add_argument("--skip", action="append", default=[], choices=("padded, all", "continuous", "one by one"))
    parser.add_argument("--json", action="store_true", help="no table")
    args = parser.parse_args(argv)
    if min(args.requests, args.repeat) < 1:
        parser.error(f"--requests {args.requests}, --repeat {args.repeat}: both must be at least 1")
    args.backend, args.torch_dtype = None, getattr(torch, args.dtype)  # backend None: the fastest here
    args.fuse, args.graphs, args.overlap = None, "auto", False  # what chapter 33 adds, where it pays
    return args


def peer(model, args):
    """The same weights in transformers: from the same folder, or a random model's from one written for it."""
    from engine.models.known import resolve

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as made:
        if (folder := Path(made) if args.model == "random" else resolve(args.model)) == Path(made):
            config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"} | asdict(model.cfg)
            (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
            save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
        load = transformers.AutoModelForCausalLM.from_pretrained
        return load(folder, dtype=args.torch_dtype, attn_implementation="sdpa").eval()


def cut(tokens: list[int], max_tokens: int, eos: list[int]) -> list[int]:
    """What was asked for of a padded row: max_tokens, or up to the first EOS and with it."""
    tokens = tokens[:max_tokens]
    return tokens[: next((i + 1 for i, token in enumerate(tokens) if token in eos), None)]


@torch.inference_mode()
def run_padded(model, work, size: int, eos: list[int]):
    """(outputs, seconds) of `generate` on `size` requests at a time."""
    config = transformers.GenerationConfig(do_sample=False, eos_token_id=eos or None, pad_token_id=eos[0] if eos else 0)
    outputs, begin = [], time.perf_counter()
    for start in range(0, len(work), size):
        batch = work[start : start + size]
        width = max(len(w.prompt) for w in batch)
        ids = torch.tensor([[0] * (width - len(w.prompt)) + w.prompt for w in batch])
        mask = torch.tensor([[0] * (width - len(w.prompt)) + [1] * len(w.prompt) for w in batch])
        longest = max(w.max_tokens for w in batch)
        rows = model.generate(ids, attention_mask=mask, generation_config=config, max_new_tokens=longest)
        outputs += [cut(row, w.max_tokens, eos) for row, w in zip(rows[:, width:].tolist(), batch, strict=True)]
    return outputs, time.perf_counter() - begin


@torch.inference_mode()
def run_continuous(model, work, eos: list[int]):
    """(outputs, seconds) of transformers' continuous batching; as with the core, the pool is made before the clock."""
    pool = transformers.ContinuousBatchingConfig(page_size=16, num_blocks=4096, max_batch_tokens=2048)
    config = transformers.GenerationConfig(do_sample=False, eos_token_id=eos or -1)
    manager, results = None, {}
    try:
        manager = model.init_continuous_batching(config, pool)
        manager.warmup()
        manager.start()
        begin = time.perf_counter()
        for i, w in enumerate(work):
            manager.add_request(w.prompt, request_id=str(i), max_new_tokens=w.max_tokens)
        while len(results) < len(work):
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise CannotRunError(f"its thread ended: {manager.background_thread_status.fatal_error!r}")
            if result is not None and result.error is not None:
                raise CannotRunError(result.error)
            if result is not None and result.is_finished():
                results[result.request_id] = list(result.generated_tokens)
        seconds = time.perf_counter() - begin
    except (RuntimeError, ValueError, ImportError, NotImplementedError, AttributeError) as error:
        raise CannotRunError(f"{type(error).__name__}: {error}") from error
    finally:
        if manager is not None and manager.is_running():
            manager.stop(block=True)
    return [results[str(i)] for i in range(len(work))], seconds


def run_ours(model, work, args):
    from engine.milestones.core import run_core

    run = run_core(model, work, args, num_blocks=4096)
    return run.outputs, run.seconds


def engines_for(model, args) -> dict:
    """Name -> function of work that gives (outputs, seconds)."""
    theirs, eos = peer(model, args), model.cfg.eos_token_id
    eos = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    engines = {
        "core": lambda work: run_ours(model, work, args),
        PADDED: lambda work: run_padded(theirs, work, 8, eos),
        "padded, all": lambda work: run_padded(theirs, work, len(work), eos),
        "continuous": lambda work: run_continuous(theirs, work, eos),
        "one by one": lambda work: run_padded(theirs, work, 1, eos),
    }
    return {name: run for name, run in engines.items() if name not in args.skip}


def measure(engines, work, gate, repeat: int):
    """(what is wrong or None, name -> (tokens, seconds of each turn)). The first turn, on two requests, warms up."""
    runs = {name: (0, []) for name in engines}
    for turn in range(repeat + 1):
        for name in list(runs):
            try:
                outputs, taken = engines[name](work if turn else work[:2])
            except CannotRunError as error:
                print(f"{name} does not run here: {' '.join(str(error).split())}", file=sys.stderr)
                del runs[name]
                continue
            if turn and (wrong := gate.check(name, outputs)[0]):
                return wrong, {}
            runs[name] = sum(map(len, outputs)), [*runs[name][1], taken] if turn else []
    return None, runs


def report(runs, args) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("engine", "output tokens", "tok/s", "× padded, 8", "seconds, least to most")
    speeds = {name: count / statistics.median(times) for name, (count, times) in runs.items()}
    for name, (count, times) in runs.items():
        ratio = speeds[name] / speeds[PADDED]
        line = {"engine": name, "output_tokens": count, "tok_s": round(speeds[name], 1), "ratio": round(ratio, 3)}
        print(json.dumps(line), flush=True)
        table.add_row(*map(str, (name, count, line["tok_s"], f"{ratio:.2f}", f"{min(times):.2f} to {max(times):.2f}")))
    if not args.json:
        Console(stderr=True, width=None if sys.stderr.isatty() else 110).print(table)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    os.environ.setdefault("IMPL", "solution")  # before the engine is imported
    from engine.milestones.precision import Gate
    from engine.milestones.workload import get_model, shared_opening, shared_text

    model, tokenizer = get_model(args.model, args.width, args.seed, args.torch_dtype)
    work = (shared_text if tokenizer else shared_opening)(args.requests, tokenizer or model.cfg.vocab_size, args.seed)
    exact = model if args.dtype == "float32" else copy.deepcopy(model).float()  # the same weights, exact in float32
    want, _ = run_ours(exact, work, args)
    gate = Gate(exact, [w.prompt for w in work], want, args.torch_dtype)
    wrong, runs = measure(engines_for(model, args), work, gate, args.repeat)
    if wrong:
        print(f"WRONG OUTPUT, so no speed is printed. {wrong}", file=sys.stderr)
    else:
        report(runs, args)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
