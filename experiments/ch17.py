"""Our logits beside transformers': how far apart, next to what rounding allows.  python experiments/ch17.py [FOLDER]

Without a folder: random weights of several shapes, saved by transformers, loaded by us. Needs tests/requirements.txt.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SHAPES = {
    "qwen3, 4 heads on 1": ("Qwen3", {"num_key_value_heads": 2, "num_attention_heads": 8, "head_dim": 48}),
    "qwen3, tied": ("Qwen3", {"num_key_value_heads": 8, "num_attention_heads": 8, "tie_word_embeddings": True}),
    "llama": ("Llama", {"num_key_value_heads": 4, "num_attention_heads": 8, "head_dim": 32}),
}


def random_folder(family, sizes):
    """A checkpoint folder of random weights, written by transformers."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    sizes = {"vocab_size": 2000, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 4} | sizes
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**sizes, initializer_range=0.08)
    )
    folder = tempfile.mkdtemp(prefix="ch17-")
    model.save_pretrained(folder)
    return folder


def compare(name, folder):
    import torch
    from transformers import AutoModelForCausalLM

    from engine.models.loading import load

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours, _ = load(folder, dtype=torch.float32)
    ids = torch.randint(0, ours.cfg.vocab_size, (1, 128), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        theirs, got = reference(ids).logits, ours(ids)
        exact = reference.double()(ids).logits
    error, noise, largest = (float(x.abs().max()) for x in (got - theirs, theirs - exact, exact))
    same = float((got.argmax(-1) == theirs.argmax(-1)).float().mean())
    print(f"{name:<22} {largest:>13.2f} {error:>18.1e} {noise:>22.1e} {same:>13.1%}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="a Hugging Face checkpoint of Qwen3 or Llama")
    parser.add_argument("--impl", choices=("engine", "solution"), default="solution")
    args = parser.parse_args()
    os.environ["IMPL"] = args.impl
    header = ("model", "largest logit", "ours - theirs", "theirs - theirs in f64", "same argmax")
    print(f"{header[0]:<22} {header[1]:>13} {header[2]:>18} {header[3]:>22} {header[4]:>13}")
    if args.folder:
        compare(Path(args.folder).name, args.folder)
        return
    for name, (family, sizes) in SHAPES.items():
        compare(name, random_folder(family, sizes))


if __name__ == "__main__":
    main()
