"""A model without floating-point doubt: its next token is an integer function of every (token, position) it can see.

It has the parts of chapter 17's model that an engine uses: `cfg`, `model(input_ids, cache, positions)`, `lm_head`. One
wrong position, one stale key or one missing key changes what follows, and the oracle below is plain Python.
"""

from types import SimpleNamespace

import torch

VOCAB, LAYERS, HEADS, PRIME = 97, 2, 2, 1_000_003


def mix(token, position, layer, head):
    """Works on ints and on int tensors: what one key adds to the state of every query that sees it."""
    return ((token + 3) * (2 * position + 5) * (7 * layer + 3 * head + 11) + position * position) % PRIME


def score(state, token):
    return (state * (2 * token + 1) + 7 * token * token) % 101


def next_token(prefix):
    state = sum(mix(t, p, lay, h) for p, t in enumerate(prefix) for lay in range(LAYERS) for h in range(HEADS)) % PRIME
    return max(range(VOCAB), key=lambda token: (score(state, token), -token))


def continuation(prompt, max_tokens, stop=()):
    """What any engine must answer: greedy, one request alone, no cache at all."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


class PrefixModel(torch.nn.Module):
    """`forwards`: (B, T, S) of each forward, S keys read; `head_rows`: rows of each call of the LM head."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))  # the dtype of the cache
        self.cfg = SimpleNamespace(
            num_hidden_layers=LAYERS,
            num_key_value_heads=HEADS,
            head_dim=2,
            vocab_size=VOCAB,
            max_position_embeddings=4096,
        )
        self.forwards, self.head_rows = [], []
        self.fail_forward_in = self.fail_head_in = 0  # n > 0: the n-th call from now on fails

    def model(self, input_ids, cache=None, positions=None):
        self.fail_forward_in -= 1
        if self.fail_forward_in == 0:
            raise MemoryError("the test makes this forward fail")
        (B, T), state = input_ids.shape, 0
        for layer in range(LAYERS):
            kv = torch.empty(B, HEADS, T, 2, dtype=torch.float64)
            for head in range(HEADS):
                kv[:, head, :, 0] = mix(input_ids, positions, layer, head)
                kv[:, head, :, 1] = input_ids
            k, v, k_pos, _ = cache.append(layer, kv, kv, positions)
            visible = (k_pos <= positions[..., None])[:, None]  # [B, 1, T, S]
            state = state + torch.where(visible, v[:, :, None, :, 0], 0.0).sum(-1).sum(1)  # [B, T]
        self.forwards.append((B, T, k.shape[2]))
        return state.remainder(PRIME)[..., None]

    def lm_head(self, hidden):
        self.fail_head_in -= 1
        if self.fail_head_in == 0:
            raise MemoryError("the test makes this LM head fail")
        self.head_rows.append(hidden[..., 0].numel())
        return score(hidden.long(), torch.arange(VOCAB)).double()
