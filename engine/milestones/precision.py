"""Which number type to compute in, and how far its rounding may change greedy tokens."""

import torch

from engine.exercises.doctor import matmul_gflops
from engine.models.loading import DTYPES

CHOICES = (*DTYPES, "auto")
PAYS = 1.5  # bfloat16 is taken from this speed-up of a linear layer on
ROUNDINGS = 17  # of a value on its way through a layer: two norms of two, q_norm two, RoPE, four projections, the
#                 probabilities and the output of attention, SiLU, product, two additions to the residual stream


def choose_dtype(name: str, say, device: str = "cpu") -> torch.dtype:
    """The type of that name; "auto" measures on a CPU, takes bfloat16 on a GPU, and says so."""
    if name != "auto":
        return DTYPES[name]
    if device == "cuda":
        say("--dtype auto: bfloat16, which a GPU's matrix units are made for")
        return torch.bfloat16
    speeds = matmul_gflops(torch)
    ratio = speeds["bf16"] / speeds["f32"]
    chosen = "bfloat16" if ratio >= PAYS else "float32"
    say(f"--dtype auto: {chosen}, as a linear layer is {ratio:.1f}x as fast in bfloat16 as in float32 here")
    return DTYPES[chosen]


def stream_lengths(model, token_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states [T, hidden] before the LM head, and the lengths [L, T] of the residual stream after each layer."""
    inner, lengths = model.model, []
    after = [*inner.layers[1:], inner.norm]  # whose input is what the layer before has left
    hooks = [m.register_forward_pre_hook(lambda _, args: lengths.append(args[0][0].norm(dim=-1))) for m in after]
    try:
        hidden = inner(torch.tensor([token_ids], device=model.lm_head.weight.device))[0]
    finally:
        for hook in hooks:
            hook.remove()
    return hidden, torch.stack(lengths)


def margins_and_bounds(model, hidden, lengths, best, other, dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Leads [T] of the tokens best [T] over other [T] in float32, and how far rounding to dtype may move each [T].

    hidden [T, hidden] and lengths [L, T]: as from `stream_lengths`, of the same model in float32.

    In each layer a value is rounded 17 times, each time by at most u of itself (u: 2^-8 in bfloat16, 2^-11 in float16).
    Errors that are as good as random add up like lengths at right angles (Higham and Mary, 2019), so layer l leaves an
    error of sqrt(17) u |x_l| in the residual stream x_l, which carries it to the end. The final norm scales the stream,
    and rounds twice itself. So the last hidden state h is off by e |h|, with

        e = u sqrt(17 (|x_1|^2 + ... + |x_L|^2) / |x_L|^2 + 2)

    In d dimensions an error of no special direction has 1/sqrt(d) of its length along w_a - w_b, the difference of two
    rows of the LM head, so l_a - l_b moves by e rms(h) |w_a - w_b|. And each logit is itself rounded, by u of it:

        bound = 4 e rms(h) |w_a - w_b| + u (|l_a| + |l_b|)          the 4 is for safety, as in chapter 17
    """
    u = torch.finfo(dtype).eps / 2
    first, second = model.lm_head.weight[best], model.lm_head.weight[other]  # [T, hidden]
    leader, follower = (first * hidden).sum(-1), (second * hidden).sum(-1)
    error = u * (ROUNDINGS * (lengths / lengths[-1]).square().sum(0) + 2).sqrt()
    rms = hidden.square().mean(-1).sqrt()
    bound = 4 * error * rms * (first - second).norm(dim=-1) + u * (leader.abs() + follower.abs())
    return leader - follower, bound


class Gate:
    """Compares greedy outputs with the oracle's: equal in float32, equal up to near ties in a shorter type.

    model: the oracle, in float32, with the weights that are judged.  prompts: its inputs.  want: its outputs.
    In a shorter type an engine may choose another token where `margins_and_bounds` says that rounding explains it.
    What follows has another context and is not compared.
    """

    def __init__(self, model, prompts: list[list[int]], want: list[list[int]], dtype: torch.dtype):
        self.model, self.prompts, self.want, self.dtype = model, prompts, want, dtype
        self.margins: dict[tuple[int, int, int], tuple[float, float]] = {}  # (request, place, token) -> margin, bound

    def check(self, name: str, got: list[list[int]]) -> tuple[str | None, dict]:
        """(what is wrong or None, the near ties: (request, place, token) -> (margin, bound)) of one engine."""
        ties = {}
        for i, (a, b) in enumerate(zip(got, self.want, strict=True)):
            if a == b:
                continue
            at = next((j for j, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            where = f"{name}: request {i} differs from generate at output token {at}"
            if self.dtype == torch.float32 or at == min(len(a), len(b)):
                return f"{where}: {a[at : at + 1]} not {b[at : at + 1]}", ties
            margin, bound = ties[i, at, a[at]] = self.margin(i, at, a[at])
            if margin > bound:
                explained = f"float32 prefers {b[at]} to {a[at]} by {margin:.3g}, rounding explains {bound:.3g}"
                return f"{where}: {explained}", ties
        return None, ties

    @torch.inference_mode()
    def margin(self, request: int, place: int, token: int) -> tuple[float, float]:
        """By how much the oracle prefers its own token at that place to `token`, and how far rounding may move that."""
        key = request, place, token
        if key not in self.margins:
            context = self.prompts[request] + self.want[request][:place]
            hidden, lengths = stream_lengths(self.model, context)
            pair = [torch.tensor([token], device=hidden.device) for token in (self.want[request][place], token)]
            found = margins_and_bounds(self.model, hidden[-1:], lengths[:, -1:], *pair, self.dtype)
            self.margins[key] = tuple(values.item() for values in found)
        return self.margins[key]
