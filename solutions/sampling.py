"""Answers of chapter 8."""

import torch


def sample(logits, temperature=1.0, top_k=0, top_p=1.0, generator=None):
    if logits.ndim != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits have shape {list(logits.shape)}, expected [B, V] with V >= 1")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}; it must be finite and at least 0")
    if not isinstance(top_k, int) or top_k < 0:
        raise ValueError(f"top_k is {top_k}; it must be an integer, at least 0 (0: off)")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; it must be in (0, 1]")
    logits = logits.float()
    highest = logits.amax(dim=-1, keepdim=True)  # [B, 1]; NaN if any logit of the row is
    if not highest.isfinite().all():
        row = int((~highest.isfinite()).nonzero()[0, 0])
        raise ValueError(f"row {row} of the logits has the maximum {highest[row].item()}: nothing to draw from")
    if temperature == 0:
        return logits.argmax(dim=-1)

    logits = logits / min(max(temperature, 1e-30), 1e30)  # float32 must be able to hold divisor and quotient
    if top_k in range(1, logits.shape[1]) or top_p < 1:
        logits, ids = logits.sort(dim=-1, descending=True, stable=True)  # stable: equals stay in the order of their ids
        if top_k:
            logits = logits[:, :top_k]
        probs = logits.softmax(dim=-1)
        if top_p < 1:
            reached = probs.cumsum(dim=-1)[:, :-1] >= top_p  # by the tokens before this one: then it is not needed
            probs[:, 1:].masked_fill_(reached, 0.0)
        return ids.gather(1, torch.multinomial(probs, 1, generator=generator)).squeeze(1)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator).squeeze(1)


def generate(
    model, prompt_token_ids, max_tokens=16, temperature=0.0, top_k=0, top_p=1.0, generator=None, eos_token_id=None
):
    prompt = [int(token) for token in prompt_token_ids]
    if not prompt:
        raise ValueError("prompt_token_ids is empty; there is nothing to continue")
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; it must be at least 1")
    stops = () if eos_token_id is None else (eos_token_id,) if isinstance(eos_token_id, int) else tuple(eos_token_id)
    weight = next(model.parameters(), None) if isinstance(model, torch.nn.Module) else None
    device = torch.device("cpu") if weight is None else weight.device
    new = []
    with torch.inference_mode():
        while len(new) < max_tokens:
            logits = model(torch.tensor([prompt + new], device=device))  # [1, T, V]
            token = int(sample(logits[:, -1], temperature, top_k, top_p, generator))
            new.append(token)
            if token in stops:
                break
    return new
