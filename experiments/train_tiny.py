"""The tiny model in engine/assets/tiny: its data, its training, its export. Four stages, run from the repository root:

    python -m experiments.train_tiny prepare            # text and tokenizer, a minute; needs network and `bible`
    python -m experiments.train_tiny train              # minutes on a GPU
    python -m experiments.train_tiny plot               # loss curves as PNG; takes several --run
    python -m experiments.train_tiny export             # engine/assets/tiny in Hugging Face layout

Everything in between lives in --data and --run and is not under version control. Needs experiments/requirements.txt.
"""

import argparse
import json
import os
from pathlib import Path

import torch

os.environ.setdefault("IMPL", "solution")  # a shipped model should not depend on whose attention is filled in

DATA, RUN, ASSET = ".train", ".train/run", "engine/assets/tiny"


def cmd_prepare(args) -> None:
    from experiments.train_tiny_data import prepare

    print(json.dumps(prepare(Path(args.data), args.vocab_size), indent=2))


def cmd_train(args) -> None:
    from experiments.train_tiny_loop import train

    train(args)


def cmd_plot(args) -> None:
    from experiments.train_tiny_export import plot

    plot([Path(run) for run in args.run], Path(args.out))


def cmd_export(args) -> None:
    from experiments.train_tiny_export import export

    export(Path(args.run), Path(args.data), Path(args.out))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = parser.add_subparsers(required=True, metavar="STAGE")

    stage = stages.add_parser("prepare", help="make the text, the tokenizer and the token ids")
    stage.add_argument("--data", default=DATA)
    stage.add_argument("--vocab-size", type=int, default=4096)
    stage.set_defaults(stage=cmd_prepare)

    stage = stages.add_parser("train", help="train, keep the best checkpoint")
    stage.set_defaults(stage=cmd_train)
    add_train_arguments(stage)

    stage = stages.add_parser("plot", help="loss curves of one or several runs")
    stage.add_argument("--run", nargs="+", default=[RUN])
    stage.add_argument("--out", default="experiments/train_tiny.png")
    stage.set_defaults(stage=cmd_plot)

    stage = stages.add_parser("export", help="write the model folder")
    stage.add_argument("--run", default=RUN)
    stage.add_argument("--data", default=DATA)
    stage.add_argument("--out", default=ASSET)
    stage.set_defaults(stage=cmd_export)
    return parser.parse_args()


def add_train_arguments(stage: argparse.ArgumentParser) -> None:
    add = stage.add_argument
    add("--data", default=DATA, help="what `prepare` wrote")
    add("--run", default=RUN, help="folder for the best checkpoint and log.jsonl")
    add("--state", help="folder for what --resume needs (weights and optimizer); default: --run")
    add("--resume", action="store_true")
    add("--seed", type=int, default=0)
    add("--layers", type=int, default=4)
    add("--hidden", type=int, default=256)
    add("--heads", type=int, default=4)
    add("--kv-heads", type=int, default=2)
    add("--head-dim", type=int, default=64)
    add("--ffn", type=int, default=1024)
    add("--context", type=int, default=512, help="tokens a training window")
    add("--rope-theta", type=float, default=10_000.0)
    add("--steps", type=int, default=9000)
    add("--batch", type=int, default=32, help="windows a step")
    add("--lr", type=float, default=3e-3)
    add("--warmup", type=int, default=200)
    add("--weight-decay", type=float, default=2.0)
    add("--dropout", type=float, default=0.25)
    add("--eval-every", type=int, default=200)
    add("--patience", type=int, default=10, help="evaluations without a better held-out loss; 0: never stop early")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--bf16", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    add("--compile", action="store_true")


def main() -> None:
    args = vars(parse_args())
    args.pop("stage")(argparse.Namespace(**args))


if __name__ == "__main__":
    main()
