import torch


def attend_tiles(q, tiles, scale):
    q = q.float()
    largest = torch.full((len(q),), -torch.inf, device=q.device)
    total = torch.zeros_like(largest)
    out = torch.zeros_like(q)
    for k, v, seen in tiles:
        scores = (q @ k.float().T * scale).masked_fill(~seen, -torch.inf)  # [G, T]
        new = torch.maximum(largest, scores.amax(dim=1))
        base = new.masked_fill(new == -torch.inf, 0)  # nothing seen yet: -inf - -inf would be NaN
        shrink = (largest - base).exp()
        weights = (scores - base[:, None]).exp()
        total = total * shrink + weights.sum(dim=1)
        values = v.float().masked_fill(~seen.any(dim=0)[:, None], 0)  # 0 * NaN is NaN
        out = out * shrink[:, None] + weights @ values
        largest = new
    return out / total.clamp(min=torch.finfo(torch.float32).tiny)[:, None], largest + total.log()


def merge_splits(outs, lses):
    largest = lses.amax(dim=0)
    base = largest.masked_fill(largest == -torch.inf, 0)
    weights = (lses - base).exp()  # [S, G]
    total = weights.sum(dim=0)
    seen = outs.masked_fill(lses[..., None] == -torch.inf, 0)
    out = (weights[..., None] * seen).sum(dim=0) / total.clamp(min=1e-30)[:, None]
    return out, base + total.log()
