"""From logits to text: choosing a token, and the plain loop that every faster engine must agree with."""

import torch  # noqa: F401  (for the bodies of the exercises)

from engine.exercises import exercise, fill


@exercise(8, "From logits to a token")
def sample(logits, temperature=1.0, top_k=0, top_p=1.0, generator=None):
    """Draw one token for every row of logits.  (Your engine: Chapter 8)

    logits: [B, V] of any floating dtype, computed with in float32. -inf means never; B rows are drawn independently.
    temperature: logits are divided by it before anything else, and however small or large it is, no NaN comes of it;
        0 takes the largest logit, the lowest id among equals, whatever top_k and top_p are, and draws nothing.
    top_k: only the k largest logits stay; 0 is off, and so is any k >= V.
    top_p: of what top_k left, renormalised, the smallest set of most probable tokens whose probabilities sum up to at
        least top_p stays, so at least one token does; 1.0 is off.
    Both filters rank equal logits by id, lower first, so the k-th of several equals is decided too.
    generator: torch.Generator on the device of the logits, the only source of randomness; None is torch's global one.
    The three parameters are scalars, the same for all rows. `logits` is left unchanged.

    Returns [B] int64, every token drawn with its probability renormalised over what stays.
    Raises ValueError, naming the value: logits not [B, V] with V >= 1; a row that holds NaN or +inf, or only -inf;
    temperature negative, NaN or infinite; top_k negative or no integer; top_p outside (0, 1].

    Source: top-k: Fan et al. (2018); top-p: Holtzman et al., "The Curious Case of Neural Text Degeneration" (2019).
    """
    raise NotImplementedError


@exercise(8, "The loop that everything later must equal")
def generate(
    model, prompt_token_ids, max_tokens=16, temperature=0.0, top_k=0, top_p=1.0, generator=None, eos_token_id=None
):
    """Continue one prompt token by token, with a full forward pass each time.  (Your engine: Chapter 8)

    model: callable; model(input_ids [1, T] int64) -> logits [1, T, V]; those at t score the token at t + 1. A
        torch.nn.Module gets input_ids on the device of its parameters, any other callable on the CPU.
    prompt_token_ids: ints, at least one; not changed.
    max_tokens: largest number of new tokens, at least 1.
    temperature, top_k, top_p, generator: as in `sample`.
    eos_token_id: None, an int or a tuple of ints; the first *new* token that is one of them is kept and ends the text.

    The model is called once per new token, on the prompt and all new tokens so far, with gradients off.
    Returns the new tokens, a list of int.
    Raises ValueError: empty prompt; max_tokens below 1; whatever `sample` refuses.
    """
    raise NotImplementedError


fill(__name__)
