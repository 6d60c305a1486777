"""Trains the tiny model: the engine's own modules, with PyTorch's fused attention put in for the backward pass.

The corpus is small, so a run sees it dozens of times; dropout, weight decay and keeping the best checkpoint are what
stands between that and learning it by heart.
"""

import json
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engine.models import qwen3

BEST, STATE, LOG = "best.safetensors", "state.safetensors", "log.jsonl"


def fused_attention(q, k, v, q_pos, k_pos, allowed=None, scale=None):
    """`causal_attention` for the one case of training: whole sequences from position 0, nothing cached."""
    q, k = q.to(v.dtype), k.to(v.dtype)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


def model_config(args, vocab_size: int) -> dict:
    """The config.json of the model that these arguments describe; token 0 is <|endoftext|>."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": args.hidden,
        "intermediate_size": args.ffn,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "head_dim": args.head_dim,
        "max_position_embeddings": args.context,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": args.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "initializer_range": 0.02,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "use_cache": True,
        "dtype": "bfloat16",
    }


def build(config: dict, seed: int = 0, dropout: float = 0.0) -> qwen3.Qwen3:
    """A fresh model; dropout acts on the embedding and on what each half of a block adds to the residual path."""
    torch.manual_seed(seed)
    qwen3.causal_attention = fused_attention
    model = qwen3.Qwen3(qwen3.Qwen3Config.from_dict(config))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            # GPT-2's rule: the sum over 2 * layers residual branches keeps its variance.
            into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = 0.02 / math.sqrt(2 * config["num_hidden_layers"]) if into_residual else 0.02
            torch.nn.init.normal_(parameter, std=std)
    if dropout:
        for name, module in model.named_modules():
            if name.endswith(("embed_tokens", "self_attn", "mlp")):
                module.register_forward_hook(lambda m, _, out: F.dropout(out, dropout, m.training))
    return model


def read_tokens(folder: Path, name: str) -> torch.Tensor:
    path = folder / f"{name}.npy"
    if not path.exists():
        raise FileNotFoundError(f"{path}: run the stage `prepare` first")
    return torch.from_numpy(np.load(path).astype(np.int64))


@torch.no_grad()
def evaluate(model, ids: torch.Tensor, context: int, batch: int = 16) -> float:
    """Mean loss in nats over all tokens but the first, in windows of `context` that start without any history."""
    was_training = model.training
    model.eval()
    windows = [ids[i : i + context + 1] for i in range(0, len(ids) - 1, context)]
    whole, rest = [w for w in windows if len(w) == context + 1], [w for w in windows if len(w) <= context]
    batches = [torch.stack(whole[i : i + batch]) for i in range(0, len(whole), batch)] + [w[None] for w in rest]
    total = sum(
        F.cross_entropy(model(b[:, :-1]).flatten(0, 1), b[:, 1:].flatten(), reduction="sum").item() for b in batches
    )
    model.train(was_training)
    return total / (len(ids) - 1)


def measures(loss: float, meta: dict) -> dict:
    """Held-out loss per token in nats, perplexity, and bits per byte of text, which no tokenizer can flatter."""
    bits = loss * (meta["heldout"]["tokens"] - 1) / math.log(2)
    return {"loss": loss, "perplexity": math.exp(loss), "bits_per_byte": bits / meta["heldout"]["bytes"]}


def describe(scores: dict) -> str:
    return (
        f"held-out loss {scores['loss']:.4f}, perplexity {scores['perplexity']:.2f} per token, "
        f"{scores['bits_per_byte']:.4f} bits per byte"
    )


def learning_rate(step: int, args) -> float:
    """Linear warm-up, then a cosine down to zero."""
    if step <= args.warmup:
        return args.lr * step / args.warmup
    return args.lr * 0.5 * (1 + math.cos(math.pi * (step - args.warmup) / max(args.steps - args.warmup, 1)))


def make_optimizer(model, args):
    matrices = [p for p in model.parameters() if p.ndim == 2]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=args.device == "cuda")


def train(args) -> dict:
    """Train until args.steps or until args.patience evaluations brought nothing better; return the last record."""
    data, run, state_path = Path(args.data), Path(args.run), Path(args.state or args.run) / STATE
    run.mkdir(parents=True, exist_ok=True)
    state_path.parent.mkdir(parents=True, exist_ok=True)
    meta = json.loads((data / "meta.json").read_text())
    train_ids, heldout = read_tokens(data, "train").to(args.device), read_tokens(data, "heldout").to(args.device)
    config = model_config(args, meta["vocab_size"])
    model = build(config, args.seed, args.dropout).to(args.device).train()
    optimizer = make_optimizer(model, args)
    start, best, stale = resume(state_path, model, optimizer) if args.resume else (0, math.inf, 0)
    log = Log(run / LOG, keep_until=start)
    log.write("config", step=start, parameters=sum(p.numel() for p in model.parameters()), **vars(args))
    forward = torch.compile(model, dynamic=False) if args.compile else model
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("train", total=args.steps, completed=start)
        began, losses = time.perf_counter(), []
        for step in range(start + 1, args.steps + 1):
            losses.append(train_step(forward, optimizer, train_ids, step, args))
            progress.advance(task)
            if step % args.eval_every and step != args.steps:
                continue
            train_loss = torch.stack(losses).mean().item()  # waits for the device, so that the clock below is right
            rate = len(losses) * args.batch * args.context / (time.perf_counter() - began)
            with autocast(args):
                scores = measures(evaluate(model, heldout, args.context), meta)
            epochs = step * args.batch * args.context / len(train_ids)
            log.write("eval", step=step, epochs=epochs, train=train_loss, tokens_per_s=rate, **scores)
            line = f"step {step:>6}  epoch {epochs:5.1f}  train {train_loss:.4f}  held out {scores['loss']:.4f}"
            line += f"  {scores['bits_per_byte']:.4f} bits/byte  {rate:,.0f} tok/s"
            progress.console.print(line, highlight=False, soft_wrap=True)
            stale = 0 if scores["loss"] < best else stale + 1
            if stale == 0:
                best = scores["loss"]
                save_best(run / BEST, model, config, step)
            save_state(state_path, model, optimizer, step, best, stale)
            if args.patience and stale >= args.patience:
                progress.console.print(f"no better held-out loss in {stale} evaluations: stopping")
                break
            began, losses = time.perf_counter(), []
    final = score(run, data, args.device)
    log.write("final", **final)
    print(f"{run}: best at step {final['step']}; saved weights (bfloat16): {describe(final)}")
    return final


def train_step(model, optimizer, ids: torch.Tensor, step: int, args) -> torch.Tensor:
    """One update on random windows; the loss, still on the device."""
    # Seeded per step, not per run: a resumed run draws the same windows and the same dropout.
    torch.manual_seed(args.seed * 1_000_003 + step)
    starts = torch.randint(len(ids) - args.context, (args.batch, 1)).to(args.device)
    batch = ids[starts + torch.arange(args.context + 1, device=args.device)]
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, args)
    with autocast(args):
        logits = model(batch[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def autocast(args):
    return torch.autocast(args.device, torch.bfloat16, enabled=args.bf16)


class Log:
    """JSON lines; on resuming, the lines of steps that will be done again go away."""

    def __init__(self, path: Path, keep_until: int):
        lines = path.read_text().splitlines() if keep_until and path.exists() else []
        lines = [line for line in lines if (r := json.loads(line))["kind"] != "final" and r["step"] <= keep_until]
        path.write_text("".join(line + "\n" for line in lines))
        self.path = path

    def write(self, kind: str, **values) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"kind": kind, **values}) + "\n")


def save(path: Path, tensors: dict, **metadata) -> None:
    """Safetensors, renamed into place: an interrupted run leaves the old file, never half a file."""
    part = path.with_suffix(".part")
    save_file({k: v.contiguous() for k, v in tensors.items()}, part, {k: json.dumps(v) for k, v in metadata.items()})
    os.replace(part, path)


def save_best(path: Path, model, config: dict, step: int) -> None:
    # named_parameters lists the tied matrix once, under the name of the embedding: as Hugging Face stores it.
    save(path, {n: p.detach().to(torch.bfloat16) for n, p in model.named_parameters()}, config=config, step=step)


def save_state(path: Path, model, optimizer, step: int, best: float, stale: int) -> None:
    tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    for index, values in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{key}": value for key, value in values.items()}
    save(path, tensors, step=step, best=best, stale=stale)


def resume(path: Path, model, optimizer) -> tuple[int, float, int]:
    """Restore weights and optimizer from a state file; return its step, best loss and evaluations since the best."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: nothing to resume from")
    tensors, saved = load_file(path), optimizer.state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".")
            saved["state"].setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict(saved)
    values = read_metadata(path)
    return values["step"], values["best"], values["stale"]


def read_metadata(path: Path) -> dict:
    with safe_open(path, "pt") as file:
        return {key: json.loads(value) for key, value in file.metadata().items()}


def score(run: Path, data: Path, device: str) -> dict:
    """Held-out measures of the saved checkpoint: its bfloat16 weights, computed with in float32."""
    meta, saved = json.loads((data / "meta.json").read_text()), read_metadata(run / BEST)
    model, tensors = build(saved["config"]), load_file(run / BEST)
    model.load_state_dict(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    ids, context = read_tokens(data, "heldout").to(device), saved["config"]["max_position_embeddings"]
    return {"step": saved["step"], **measures(evaluate(model.to(device), ids, context), meta)}
