"""Attention over tiles of keys, one at a time: what a kernel does that never holds all scores at once."""

import torch  # noqa: F401  (what the exercises use)

from engine.exercises import exercise, fill


@exercise(32, "Online softmax")
def attend_tiles(q, tiles, scale):
    """Attention of G queries over keys that arrive in tiles, each looked at once.  (Your engine: Chapter 32)

    q: [G, D].  tiles: an iterable of (k [T, D], v [T, D], seen [G, T] bool); T may differ from tile to tile, and a tile
    may hold nothing that a query sees.  scale: factor of the scores.
    Keeps for each query the largest score so far, the sum of exp(score - largest) and the sum of the values weighted
    by it; when the largest grows, both sums shrink to the new one. Unseen keys and values have no influence, whatever
    they hold: NaN as well. All in float32.
    Returns (out [G, D], lse [G]), float32: softmax-weighted values; log of the sum of exp(score) over all keys seen.
    A query that sees nothing gets zeros and lse -inf. No key at all (no tile) counts as seeing nothing.
    Source: online softmax (Milakov and Gimelshein, 2018); FlashAttention (NeurIPS 2022).
    """
    raise NotImplementedError


@exercise(32, "Splitting a long context")
def merge_splits(outs, lses):
    """One attention result from those over parts of the keys.  (Your engine: Chapter 32)

    outs: [S, G, D] and lses: [S, G], float32, as `attend_tiles` returns them for S disjoint parts of the keys.
    A part with lse -inf saw nothing and has no weight, whatever its out holds: NaN as well.
    Returns (out [G, D], lse [G]) of all keys together: equal to attention over the whole, but for rounding. Where no
    part saw anything: zeros and -inf. Scores of any size are fine: no exp of a large positive number.
    Source: Flash-Decoding (2023).
    """
    raise NotImplementedError


fill(__name__)
