"""Sampling without a trip to the host: randomness from a counter, so that a token needs no generator of its own."""

from importlib.util import find_spec

import numpy as np
import torch

from engine.exercises import exercise, fill
from engine.serve.sampler import SimpleSampler

HOTTEST = 1e30  # whatever is hotter draws the same tokens, and would overflow in float32


def philox(seeds, tokens, places) -> np.ndarray:
    """The first of the four 32-bit numbers of Philox-4x32-10 with key `seeds` and counter (token, place, 0, 0).

    seeds [N] and places [N] i64, tokens [V] -> [N, V] uint32.  Source: Salmon et al., SC 2011.
    """
    low, word = np.uint64(0xFFFFFFFF), np.uint64(32)
    key = np.asarray(seeds, dtype=np.int64).view(np.uint64)[:, None]
    key0, key1 = key & low, key >> word
    c0 = np.broadcast_to(np.asarray(tokens, dtype=np.uint64), (len(key), len(tokens)))
    c1 = np.broadcast_to(np.asarray(places, dtype=np.uint64)[:, None], c0.shape)
    c2 = c3 = np.zeros_like(c0)
    for _ in range(10):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (b >> word) ^ c1 ^ key0, b & low, (a >> word) ^ c3 ^ key1, a & low
        key0, key1 = (key0 + np.uint64(0x9E3779B9)) & low, (key1 + np.uint64(0xBB67AE85)) & low
    return c0.astype(np.uint32)


@exercise(33, "Tokens stay on the device")
def gumbel_argmax(logits, temperatures, seeds, places) -> torch.Tensor:
    """Greedy and temperature sampling of all rows at once.  (Your engine: Chapter 33)

    logits: [N, V] on the CPU, of any floating type, computed with in float32, left as they are; none is +inf.
    temperatures: [N] f32, at most 1e30; 0 takes the largest logit.  seeds, places: [N] i64, the request's seed and the
    output position that is sampled.
    A row with a temperature takes the largest of logit + temperature * g, g = -log(-log(u)), u = ((b >> 9) + 0.5) *
    2^-23 in float32, b = philox(seeds, tokens, places) of that token: a draw from softmax(logits / temperature) that
    depends on nothing but seed, place and logits.
    Returns [N] i64: of equal scores the lowest token; V for a row without a number above -inf, or with a NaN.
    Source: Gumbel-max trick (Gumbel 1954).
    """
    raise NotImplementedError


class DeviceSampler(SimpleSampler):
    """Greedy and plain temperature rows by `draw`, in one go; rows with top_k or top_p as SimpleSampler has them.

    With a temperature it draws other tokens than SimpleSampler, from the same distribution; the same ones whatever
    the device computes besides.
    """

    def draw(self, logits, temperatures, seeds, places) -> torch.Tensor:
        """Tokens [N] i64 where the logits [N, V] are; no wait."""
        if logits.device.type == "cuda" and find_spec("triton"):
            from engine.serve.kernels.sample import draw

            return draw(logits, temperatures, seeds, places)
        cpu = (x.cpu() for x in (logits, temperatures, seeds, places))
        return gumbel_argmax(*cpu).to(logits.device)

    def __call__(self, logits, rows):
        """As SimpleSampler: logits [L, V] float32, rows of (request, output position) -> tokens."""
        if not rows:
            return []
        drawn = zip(*((*drawn_with(request.params), place) for request, place in rows), strict=True)
        token_ids = self.draw(logits, *(torch.tensor(x, device=logits.device) for x in drawn)).tolist()
        for i, (request, position) in enumerate(rows):
            if filtered(request.params):
                token_ids[i] = super().__call__(logits[i : i + 1], [(request, position)])[0]
        check_drawn(token_ids, logits.shape[1])
        return token_ids


def filtered(params) -> bool:
    """Does sampling need the sorted distribution?"""
    return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1)


def drawn_with(params) -> tuple[float, int]:
    """(temperature, seed) of a request for `draw`: greedy if filtered, to be replaced; the seed wrapped to 64 bits."""
    temperature = 0.0 if filtered(params) else min(float(params.temperature), HOTTEST)
    return temperature, ((params.seed or 0) + (1 << 63)) % (1 << 64) - (1 << 63)


def check_drawn(token_ids: list[int], vocab: int) -> None:
    """ValueError if a row had nothing to draw from."""
    if token_ids and max(token_ids) >= vocab:
        row = token_ids.index(vocab)
        raise ValueError(f"row {row} of the logits has a NaN or no number above -inf: nothing to draw from")


fill(__name__)
