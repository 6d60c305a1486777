"""Log-probabilities of sampled and of prompt tokens, kept in `request.extra` by position until they are asked for."""

import torch

from engine.serve.request import Request


def record(logits: torch.Tensor, rows: list[tuple[Request, int]], token_ids: list[int], prompt_spans) -> None:
    """Keep what the requests of this step asked for.

    logits: [L, V].  rows, token_ids: as in SimpleSampler.  prompt_spans: as in Batch.
    Writing by position makes a step that is repeated after a failure overwrite its own entries.
    """
    for i, ((request, position), token_id) in enumerate(zip(rows, token_ids, strict=True)):
        if request.params.logprobs is not None:
            _store(request, "logprobs", position, logits[i], token_id, request.params.logprobs)
    i = len(rows)
    for request, start, count in prompt_spans:
        for position in range(start + 1, start + 1 + count):  # a row tells about the token after it
            token_id = request.token_ids[position]
            _store(request, "prompt_logprobs", position, logits[i], token_id, request.params.prompt_logprobs)
            i += 1


def _store(request, kind, position, row, token_id, k) -> None:
    logprobs = row.log_softmax(dim=-1)
    best = logprobs.topk(min(k, len(logprobs)))
    entry = {token_id: float(logprobs[token_id])}
    entry.update(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    request.extra.setdefault(kind, {})[position] = entry


def output_logprobs(request: Request, count: int) -> list[dict[int, float]] | None:
    """For each of the first count output tokens {token id: log-probability}, itself and the likeliest.

    None if they were not asked for.
    """
    if request.params.logprobs is None:
        return None
    return [request.extra["logprobs"][i] for i in range(count)]


def prompt_logprobs(request: Request) -> list[dict[int, float] | None] | None:
    """For each prompt token the same; None for the first, which nothing predicts."""
    if request.params.prompt_logprobs is None:
        return None
    entries = request.extra.get("prompt_logprobs", {})
    return [entries.get(i) for i in range(request.num_prompt_tokens)]
