import numpy as np
import torch

from engine.serve.device_sampler import philox


def gumbel_argmax(logits, temperatures, seeds, places):
    scores = logits.float().clone()
    vocab = scores.shape[1]
    drawn = (temperatures > 0).nonzero().flatten()
    if len(drawn):
        bits = philox(seeds[drawn].numpy(), np.arange(vocab), places[drawn].numpy())
        uniform = (torch.from_numpy((bits >> 9).astype(np.float32)) + 0.5) * 2.0**-23
        scores[drawn] -= temperatures[drawn, None] * (-uniform.log()).log()
    best = scores.amax(dim=1)
    tokens = torch.where(scores == best[:, None], torch.arange(vocab), vocab).amin(dim=1)
    return torch.where(best > -torch.inf, tokens, vocab)
