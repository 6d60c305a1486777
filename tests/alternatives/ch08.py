"""Other right answers of chapter 8. None draws the tokens that the reference draws with the same generator."""

from tests.alternatives import alternative

CHECKS = """
def sample(logits, temperature=1.0, top_k=0, top_p=1.0, generator=None):
    import math

    def check(condition, message):
        if not condition:
            raise ValueError(message)

    check(logits.ndim == 2 and logits.shape[1] > 0, f"logits {tuple(logits.shape)}")
    check(math.isfinite(temperature) and temperature >= 0, f"temperature {temperature}")
    check(isinstance(top_k, int) and top_k >= 0, f"top_k {top_k}")
    check(0 < top_p <= 1, f"top_p {top_p}")
    x = logits.to(torch.float32, copy=True)
    check(not x.isnan().any() and not (x == math.inf).any(), "a logit is nan or inf")
    check((x > -math.inf).any(1).all(), "a row is all -inf")
    B, V = x.shape
"""

alternative("sample", name="inverse-of-the-running-sum-row-by-row", source=CHECKS + """
    chosen = []
    for row in x.tolist():
        order = sorted(range(V), key=lambda i: (-row[i], i))
        if temperature == 0:
            chosen.append(order[0])
            continue
        weights = [math.exp((row[i] - row[order[0]]) / temperature) for i in order]
        if top_k:
            weights = weights[:top_k]
        total, running, kept = sum(weights), 0.0, []
        for w in weights:
            kept.append(w)
            running += w
            if running >= top_p * total and top_p < 1:
                break
        u = torch.rand((), generator=generator, dtype=torch.float64).item() * sum(kept)
        while len(kept) > 1 and u >= kept[0]:
            u -= kept.pop(0)
            order.pop(0)
        chosen.append(order[0])
    return torch.tensor(chosen)
""")

alternative("sample", name="filters-without-a-sort-gumbel-max", source=CHECKS + """
    highest = x.max(1, keepdim=True).values
    if temperature == 0:
        return (x == highest).int().argmax(1)
    x = (x - highest) / temperature

    def best(x, room):  # the first equals of the largest value, as many as there is room for
        edge = x == x.max(1, keepdim=True).values
        return edge & (edge.cumsum(1) <= room)

    if 0 < top_k < V or top_p < 1:
        probs = x.softmax(1)
        kept = torch.zeros_like(x, dtype=torch.bool)
        if 0 < top_k < V:
            while (missing := (kept.sum(1, keepdim=True) < top_k) & (x > -math.inf).any(1, keepdim=True)).any():
                new = best(x.masked_fill(kept, -math.inf), top_k - kept.sum(1, keepdim=True)) & missing & ~kept
                if not new.any():
                    break
                kept |= new
            x = x.masked_fill(~kept, -math.inf)
            probs, kept = x.softmax(1), torch.zeros_like(kept)
        if top_p < 1:
            while (missing := (probs * kept).sum(1, keepdim=True) < top_p).any():
                new = best(probs.masked_fill(kept, -1.0), 1) & missing
                if not new.any() or bool(kept.all()):
                    break
                kept |= new
            x = x.masked_fill(~kept, -math.inf)
    noise = torch.empty_like(x).exponential_(generator=generator).clamp_min(1e-38)
    return (x - noise.log()).argmax(1)
""")

alternative("sample", name="masks-in-the-order-of-the-ids", source=CHECKS + """
    if temperature == 0:
        return x.max(dim=1).values[:, None].eq(x).float().argmax(1)
    x = ((x - x.amax(1, keepdim=True)).double() / temperature)
    rank = x.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    if top_k:
        x[rank >= top_k] = -math.inf
    probs = x.softmax(1)
    if top_p < 1:
        ordered = probs.gather(1, rank.argsort(dim=1))
        before = (ordered.cumsum(1) - ordered).gather(1, rank)
        probs = torch.where((before < top_p) | (rank == 0), probs, 0.0)
    return torch.multinomial(probs, 1, replacement=True, generator=generator)[:, 0]
""")

alternative("sampling.generate", name="recursion", source="""
def generate(
    model, prompt_token_ids, max_tokens=16, temperature=0.0, top_k=0, top_p=1.0, generator=None, eos_token_id=None
):
    prompt = list(prompt_token_ids)
    if not prompt or max_tokens < 1:
        raise ValueError(f"empty prompt or max_tokens {max_tokens}")
    ends = {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id or ())
    device = next((p.device for p in model.parameters()), None) if isinstance(model, torch.nn.Module) else None
    with torch.no_grad():
        logits = model(torch.tensor(prompt, device=device)[None])[0]
    token = sample(logits[-1:], temperature, top_k, top_p, generator).item()
    if max_tokens == 1 or token in ends:
        return [token]
    rest = (max_tokens - 1, temperature, top_k, top_p, generator, eos_token_id)
    return [token, *generate(model, [*prompt, token], *rest)]
""")

alternative("sampling.generate", name="one-tensor-that-grows", source="""
def generate(
    model, prompt_token_ids, max_tokens=16, temperature=0.0, top_k=0, top_p=1.0, generator=None, eos_token_id=None
):
    n = len(prompt_token_ids)
    if n == 0:
        raise ValueError("empty prompt")
    if max_tokens <= 0:
        raise ValueError(f"max_tokens={max_tokens}")
    ids = torch.tensor([list(prompt_token_ids)])
    if isinstance(model, torch.nn.Module):
        for p in model.parameters():
            ids = ids.to(p.device)
    for _ in range(max_tokens):
        with torch.no_grad():
            logits = model(ids)
        token = sample(logits[:, -1, :], temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        ids = torch.cat([ids, token[:, None]], dim=1)
        last = ids[0, -1].item()
        if last == eos_token_id or isinstance(eos_token_id, (tuple, list)) and last in eos_token_id:
            break
    return ids[0, n:].tolist()
""")
