"""From logits to token ids; the randomness of a token belongs to its request and its place, and to nothing else."""

import torch

from engine.sampling import sample
from engine.serve.request import Request, derive_seed


class SimpleSampler:
    """Greedy rows by one argmax; every other row through chapter 8's `sample` with a generator of its own."""

    def __call__(self, logits: torch.Tensor, rows: list[tuple[Request, int]]) -> list[int]:
        """logits [L, V] float32; rows: for each of them its request and the output position that is sampled."""
        if not rows:
            return []
        token_ids = logits.argmax(dim=-1).tolist()
        for i, (request, position) in enumerate(rows):
            params = request.params
            if params.temperature > 0:
                generator = torch.Generator(logits.device).manual_seed(derive_seed(params.seed, position))
                row = logits[i : i + 1]
                token_ids[i] = int(sample(row, params.temperature, params.top_k, params.top_p, generator))
        return token_ids
