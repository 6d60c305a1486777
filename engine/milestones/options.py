"""The options of the milestones' commands; imports nothing heavy, so that `python run.py` answers at once."""

import argparse
from dataclasses import dataclass
from pathlib import Path


def core(command) -> None:
    add_impl(command, default="solution")
    command.add_argument("--requests", type=int, default=16, metavar="N", help="default 16")
    command.add_argument("--max-tokens", type=int, metavar="N", help="output tokens of a request")
    add_model(command, "tiny, smollm2, random, or a folder with a Qwen3 or Llama (default tiny)")
    command.add_argument("--width", type=int, metavar="N", help="hidden size of the random model")
    command.add_argument("--prompts", metavar="FILE", help="one prompt a line; needs a model with a tokenizer")
    command.add_argument("--show", action="store_true", help="print the texts, to stderr")
    command.add_argument("--repeat", type=int, default=1, metavar="K", help="medians of K runs")


def kernels(command) -> None:
    add_impl(command, default="solution")
    command.add_argument("--backend", action="append", metavar="NAME", help="only this one; may be given several times")
    command.add_argument("--repeat", type=int, default=5, metavar="K", help="medians of K runs, default 5")
    command.add_argument("--threads", type=int, metavar="N", help="CPU threads")


def graphs(command) -> None:
    add_impl(command, default="solution")
    command.add_argument("--model", action="append", metavar="NAME", help="qwen3-0.6b, qwen3-8b, small: random weights")
    variants = "plain, fused, persistent, graphs, ahead, async"
    command.add_argument("--variant", action="append", metavar="NAME", help=variants)
    command.add_argument("--batch", type=int, nargs="+", default=[1, 64, 256], metavar="N", help="default 1 64 256")
    command.add_argument("--context", type=int, default=1024, metavar="N", help="tokens of a request, default 1024")
    command.add_argument("--steps", type=int, default=30, metavar="K", help="medians of K steps, default 30")
    command.add_argument("--requests", type=int, default=256, metavar="N", help="of the workload, default 256")
    command.add_argument("--no-workload", action="store_true", help="only the steps")
    help = "the workload also through transformers' continuous batching, for SECONDS at most; needs transformers"
    command.add_argument("--beside", type=float, default=0, metavar="SECONDS", help=help)
    command.add_argument("--timeline", type=Path, metavar="DIR", help="profile some steps, and draw them there")
    command.add_argument("--device", choices=("cpu", "cuda"), help="default cuda if there is a GPU, else cpu")


def overhead(command) -> None:
    add_impl(command, default="solution")
    command.add_argument("--repeat", type=int, default=50, metavar="K", help="medians of K calls, default 50")


def soak(command) -> None:
    add_impl(command, default="solution")
    command.add_argument("--minutes", type=float, default=30, metavar="M", help="default 30")
    command.add_argument("--seed", type=int, metavar="N", help="default: another one each time; it is printed")


def generate(command) -> None:
    add_impl(command, default="solution")
    add_model(command, "tiny, smollm2, or a folder with a Qwen3 or Llama (default tiny)")
    command.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    command.add_argument("--chat", action="store_true", help="a prompt is a message to a chat model")
    command.add_argument("--max-tokens", type=int, default=128, metavar="N", help="new tokens at most, default 128")
    command.add_argument(
        "--temperature", type=float, default=0.7, metavar="T", help="default 0.7; 0: the likeliest token"
    )
    command.add_argument("--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest; 0: off")
    command.add_argument("--top-p", type=float, default=1.0, metavar="P", help="draw from a share P; 1: off")
    command.add_argument("--n", type=int, default=1, metavar="N", help="samples of each prompt")
    command.add_argument("--ignore-eos", action="store_true", help="go on where the model would stop")
    command.add_argument(
        "--stream", action=argparse.BooleanOptionalAction, help="text as it comes; default on a terminal"
    )


@dataclass(frozen=True)
class Setting:
    """An option of `simulate` that a sweep may vary. default None: that of the engine, or of the model."""

    kind: type
    default: object
    help: str

    def read(self, name: str, text: str):
        """The value that a word stands for; ValueError if it stands for none."""
        if self.kind is bool:
            if text.lower() not in ("true", "false"):
                raise ValueError(f"{name} must be true or false, got {text!r}")
            return text.lower() == "true"
        try:
            return self.kind(text)
        except ValueError:
            what = "an integer" if self.kind is int else "a number"
            raise ValueError(f"{name} must be {what}, got {text!r}") from None


SIMULATE = {
    # what runs
    "gpu": Setting(str, "h200", "h200, h100, a100, l40s or l4"),
    "model": Setting(str, "qwen3-8b", "qwen3-0.6b to qwen3-32b, smollm2-135m, or a folder with a config.json"),
    "overhead_us": Setting(float, None, "microseconds a step takes beside bytes and arithmetic; default 65 a layer"),
    # the trace; medians, as lengths vary
    "requests": Setting(int, None, "default 1000; of a CSV file the first N, default all"),
    "speed": Setting(float, 1.0, "arrivals so many times as fast"),
    "rate": Setting(float, 4.0, "poisson, bursts, tree: requests a second; chat: new chats a second"),
    "seed": Setting(int, 0, "of the generators"),
    "prompt_tokens": Setting(int, 1020, "median of a prompt's own part (chat: of a message)"),
    "output_tokens": Setting(int, 129, "median of an answer"),
    "prefix_tokens": Setting(int, 512, "of each shared prefix (chat: the system prompt; tree: each node)"),
    "groups": Setting(int, 0, "poisson, bursts: so many shared prefixes"),
    "burst": Setting(int, 20, "bursts: requests at once"),
    "turns": Setting(int, 5, "chat: mean number"),
    "think": Setting(float, 10.0, "chat: mean seconds from an answer to the next turn"),
    "depth": Setting(int, 3, "tree: levels"),
    "branching": Setting(int, 4, "tree: children of a node"),
    "priorities": Setting(int, 1, "generators: levels, drawn at random"),
    # what EngineConfig has on scheduling and memory
    "block_size": Setting(int, None, "tokens in a block"),
    "num_blocks": Setting(int, None, "blocks in the pool; default: what the GPU's memory holds"),
    "max_num_batched_tokens": Setting(int, None, "token budget of a step"),
    "max_num_seqs": Setting(int, None, "requests running at once"),
    "max_model_len": Setting(int, None, "prompt + output of a request at most"),
    "max_waiting": Setting(int, None, "requests in the queue at most, default 10000; more are refused"),
    "enable_prefix_caching": Setting(bool, None, "share the blocks of common prefixes"),
    "enable_chunked_prefill": Setting(bool, None, "cut prompts to the budget"),
    "long_prefill_token_threshold": Setting(int, None, "cap on one request's share of a step"),
    "policy": Setting(str, None, "fcfs or priority"),
    "preemption_mode": Setting(str, None, "recompute or swap"),
    "swap_space_bytes": Setting(int, None, "host memory for swap"),
    "gpu_memory_utilization": Setting(float, None, "share of the GPU's memory"),
    "kv_cache_bytes": Setting(int, None, "size of the pool"),
}


def simulate(command) -> None:
    add_impl(command, default="solution")
    command.add_argument("trace", metavar="TRACE", help="poisson, bursts, chat, tree, or a CSV file")
    for name, setting in SIMULATE.items():
        flag = f"--{name.replace('_', '-')}"
        help = setting.help if setting.default in (None, 1.0) else f"{setting.help}; default {setting.default}"
        if setting.kind is bool:
            command.add_argument(flag, action=argparse.BooleanOptionalAction, default=setting.default, help=help)
        else:
            metavar = {int: "N", float: "X", str: "NAME"}[setting.kind]
            command.add_argument(flag, type=setting.kind, default=setting.default, metavar=metavar, help=help)
    command.add_argument("--sweep", metavar="OPTION=A,B,C", help="one run for each value of any option above")
    command.add_argument("--plot", metavar="FILE.png", help="over time, or over a sweep; needs matplotlib")


def add_cache(command) -> None:
    help = "where converted models are kept; also the variable MODEL_CACHE; default: the user's cache folder"
    command.add_argument("--cache", metavar="DIR", help=help)


def add_impl(command, default: str) -> None:
    command.add_argument("--impl", choices=("engine", "solution"), default=default, help=f"default {default}")
    command.add_argument("--borrow", action="append", default=[], metavar="NAME", help="not your NAME but the answer")


def add_model(command, help: str) -> None:
    """What every command has that runs a model."""
    command.add_argument("--model", default="tiny", metavar="NAME|DIR", help=help)
    dtypes = ("float32", "bfloat16", "float16", "auto")
    command.add_argument("--dtype", choices=dtypes, default="float32", help="default float32; auto measures")
    command.add_argument("--backend", metavar="NAME", help="attention backend")
    command.add_argument("--device", choices=("cpu", "cuda"), help="default cuda if there is a GPU, else cpu")
    on_off = argparse.BooleanOptionalAction
    command.add_argument("--fuse", action=on_off, help="fused kernels (chapter 33); default on a GPU")
    modes = ("on", "static", "off", "auto")
    command.add_argument("--graphs", choices=modes, default="auto", help="decode steps from CUDA graphs; default auto")
    command.add_argument("--async", action="store_true", dest="overlap", help="plan a step before the last one is read")
    command.add_argument("--seed", type=int, default=0, metavar="N", help="default 0")
    command.add_argument("--threads", type=int, metavar="N", help="CPU threads")
    add_cache(command)
