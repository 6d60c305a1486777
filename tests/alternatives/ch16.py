"""Other right answers of chapter 16."""

from tests.alternatives import alternative

alternative(
    "KVCache.append",
    name="index-copy",
    source="""
def append(self, layer, k, v, positions):
    layers, B, Hkv, room, D = self.k_cache.shape
    held, T = self.lengths[layer], positions.size(1)
    if list(k.shape) != [B, Hkv, T, D] or list(v.shape) != [B, Hkv, T, D]:
        raise ValueError(f"k {list(k.shape)} and v {list(v.shape)} should both be {[B, Hkv, T, D]}")
    for row in positions.tolist():
        for i, p in enumerate(row):
            if p != held + i:
                raise ValueError(f"position {p} came where {held + i} continues")
    if T > room - held:
        raise ValueError(f"{T} new positions, but {held} of {room} are taken")
    self.k_cache[layer].index_copy_(2, positions[0], k)
    self.v_cache[layer].index_copy_(2, positions[0], v)
    self.lengths[layer] += T
    S = self.lengths[layer]
    return self.k_cache[layer].narrow(2, 0, S), self.v_cache[layer].narrow(2, 0, S), torch.tensor(range(S)), None
""",
)

alternative(
    "kv_cache.generate",
    name="prefill-then-loop",
    source="""
def generate(
    model, prompt_token_ids, max_tokens=16, temperature=0.0, top_k=0, top_p=1.0, generator=None, eos_token_id=None
):
    P = len(prompt_token_ids)
    if P < 1 or max_tokens < 1:
        raise ValueError(f"prompt of {P} tokens, max_tokens {max_tokens}: both must be at least 1")
    if eos_token_id is None:
        ends = set()
    else:
        ends = set(eos_token_id) if isinstance(eos_token_id, (tuple, list)) else {eos_token_id}
    cfg = model.cfg
    cache = KVCache(cfg.num_hidden_layers, 1, cfg.num_key_value_heads, P + max_tokens - 1, cfg.head_dim)

    @torch.no_grad()
    def next_token(ids, positions):
        logits = model(torch.tensor(ids).view(1, -1), cache=cache, positions=positions)
        return sample(logits[:, -1, :], temperature, top_k, top_p, generator).item()

    out = [next_token(list(prompt_token_ids), torch.arange(P).view(1, P))]
    for step in range(max_tokens - 1):
        if out[-1] in ends:
            break
        out.append(next_token(out[-1:], torch.tensor([[P + step]])))
    return out
""",
)
