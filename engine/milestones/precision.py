"""Which number type to compute in, and how far its rounding may change greedy tokens."""

import torch

from engine.exercises.doctor import matmul_gflops
from engine.models.loading import DTYPES

CHOICES = (*DTYPES, "auto")
PAYS = 1.5  # bfloat16 is taken from this speed-up of a linear layer on
ROUNDINGS = 17  # of a value on its way through a layer: two norms of two, q_norm two, RoPE, four projections, the
#                 probabilities and the output of attention, SiLU, product, two additions to the residual stream


def choose_dtype(name: str, say) -> torch.dtype:
    """The type of that name; "auto" measures, and says what it found."""
    if name != "auto":
        return DTYPES[name]
    speeds = matmul_gflops(torch)
    ratio = speeds["bf16"] / speeds["f32"]
    chosen = "bfloat16" if ratio >= PAYS else "float32"
    say(f"--dtype auto: {chosen}, as a linear layer is {ratio:.1f}x as fast in bfloat16 as in float32 here")
    return DTYPES[chosen]


class Gate:
    """Compares greedy outputs with the oracle's: equal in float32, equal up to near ties in a shorter type.

    model: the oracle, in float32, with the weights that are judged.  prompts: its inputs.  want: its outputs.

    An engine in a shorter type may choose b where the oracle chose a only if rounding can close the gap between their
    logits. How much that is: a value is rounded n = 17 L + 2 times on its way through a model of L layers, each time by
    at most u of itself (u: 2^-8 in bfloat16, 2^-11 in float16). As errors that are as good as random, these add up to
    sqrt(n) u (Higham and Mary, 2019), with 4 for safety, as in chapter 17. That is how long the error of the last
    hidden state h is, against h. In d dimensions an error of no special direction has 1/sqrt(d) of its length along
    w_a - w_b, the difference of the two rows of the LM head, so l_a - l_b moves by |w_a - w_b| rms(h) times that. And
    each logit is rounded itself, by at most u of it:

        bound = 4 sqrt(n) u rms(h) |w_a - w_b| + u (|l_a| + |l_b|)

    What follows a difference has another context and is not compared.
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
        """By how much the oracle prefers its own token at that place to `token`, and the bound above."""
        key = request, place, token
        if key not in self.margins:
            context = self.prompts[request] + self.want[request][:place]
            device = next(self.model.parameters()).device
            hidden = self.model.model(torch.tensor([context], device=device))[0, -1]  # [hidden]
            pair = self.model.lm_head.weight[[self.want[request][place], token]]  # [2, hidden]
            best, other = (pair @ hidden).tolist()
            u = torch.finfo(self.dtype).eps / 2
            n = ROUNDINGS * self.model.cfg.num_hidden_layers + 2
            rms = hidden.square().mean().sqrt()
            bound = 4 * n**0.5 * u * float(rms * (pair[0] - pair[1]).norm()) + u * (abs(best) + abs(other))
            self.margins[key] = best - other, bound
        return self.margins[key]
