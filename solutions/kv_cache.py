import torch

from engine.sampling import sample


class KVCache:
    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor):
        _, B, Hkv, max_len, D = self.k_cache.shape
        T = positions.shape[-1]
        for name, x in (("k", k), ("v", v)):
            if tuple(x.shape) != (B, Hkv, T, D):
                raise ValueError(f"{name} has shape {tuple(x.shape)}; this cache takes {(B, Hkv, T, D)}")
        start = self.lengths[layer]
        end = start + T
        if end > max_len:
            raise ValueError(f"cache full: layer {layer} holds {start} of max_len {max_len}, {T} more do not fit")
        expected = torch.arange(start, end, device=positions.device).expand(B, T)
        if not torch.equal(positions.to(expected.dtype), expected):
            raise ValueError(f"layer {layer} continues at positions {start} to {end - 1}, got {positions.tolist()}")
        self.k_cache[layer, :, :, start:end] = k
        self.v_cache[layer, :, :, start:end] = v
        self.lengths[layer] = end
        k_pos = torch.arange(end, device=self.k_cache.device)
        return self.k_cache[layer, :, :, :end], self.v_cache[layer, :, :, :end], k_pos, None


def generate(
    model, prompt_token_ids, max_tokens=16, temperature=0.0, top_k=0, top_p=1.0, generator=None, eos_token_id=None
) -> list[int]:
    prompt = [int(token) for token in prompt_token_ids]
    if not prompt:
        raise ValueError("prompt_token_ids is empty; there is nothing to continue")
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; it must be at least 1")
    stops = () if eos_token_id is None else (eos_token_id,) if isinstance(eos_token_id, int) else tuple(eos_token_id)
    cache = KVCache.for_model(model, batch=1, max_len=len(prompt) + max_tokens)
    new, feed = [], prompt
    with torch.inference_mode():
        while len(new) < max_tokens:
            logits = model(torch.tensor([feed], device=cache.k_cache.device), cache)  # [1, T, V]
            token = int(sample(logits[:, -1], temperature, top_k, top_p, generator))
            new.append(token)
            if token in stops:
                break
            feed = [token]
    return new
