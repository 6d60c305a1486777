"""The fused model beside the plain one and float64: hidden states and pools, step by step, and texts of the core."""

import copy

import pytest
import torch

from engine.serve.attention import get_backend
from engine.serve.batch import Batch
from engine.serve.config import EngineConfig
from engine.serve.engine import EngineCore
from engine.serve.flat import FlatModel
from engine.serve.fused import FusedModel, merge_linears
from engine.serve.ops import PlainOps
from engine.serve.request import SamplingParams
from tests.ch31.equality import VOCAB, decided, endless, model
from tests.ch31.flat_layers import KINDS
from tests.ch31.flat_model import PlainBackend, sequences
from tests.ch31.plain_model import angles, heads_of, linear, mlp, model_of, rms_norm
from tests.ch31.ragged import UNIT, meta_of, plain_attention, positions_of
from tests.ch32.device import DEVICE
from tests.grading import expect, expect_close, expect_equal, grades, rng

FEWER, CORRECT = "33: One launch for several", "31: The correctness test"
FUSED = (merge_linears, FusedModel.attention, FusedModel.forward)
VOCABULARY, SIZE = 83, 4


def passed(model, token_ids, dtype, noise=None):
    """Float64: [hidden states [T, hidden], then K and V [T, Hkv, D] of each layer] of one sequence.

    noise: a generator; after each step of a layer every number is then off by what rounding may do to the largest: two
    units for each term of the longest sum in float32, and in a narrower type up to four halves of its `eps` more.
    """
    cfg, n = model.cfg, len(token_ids)
    scale = 2 * UNIT * cfg.intermediate_size + (2 * torch.finfo(dtype).eps if dtype != torch.float32 else 0)

    def rounded(x):
        if noise is None:
            return x
        return x + scale * x.abs().max() * torch.empty_like(x).uniform_(-1, 1, generator=noise)

    angle = angles(torch.arange(n), cfg.head_dim, cfg.rope_theta)
    hidden, kept = model.model.embed_tokens.weight[torch.tensor(token_ids)].double(), []
    for layer in model.model.layers:
        attn = layer.self_attn
        q, k, v = map(rounded, heads_of(attn, rounded(rms_norm(layer.input_layernorm, hidden)), angle))
        kept += [k, v]
        out = plain_attention(q, k[None], v[None], [(n, n)], [[0]], n, attn.scale)  # one block of n tokens
        hidden = rounded(hidden + linear(attn.o_proj, rounded(out).flatten(1)))
        hidden = rounded(hidden + mlp(layer.mlp, rounded(rms_norm(layer.post_attention_layernorm, hidden))))
    return [rounded(rms_norm(model.model.norm, hidden)), *kept]


def with_tolerances(model, token_ids, dtype):
    """(what `passed` gives, for each part how far such roundings move it: twice the worst of three tries)."""
    exact = passed(model, token_ids, dtype)
    tries = [passed(model, token_ids, dtype, rng.torch(f"noise {i}")) for i in range(3)]
    return exact, [2 * max((t[i] - exact[i]).abs().max().item() for t in tries) for i in range(len(exact))]


class Side:
    """A flat model over pools of its own, in which everything that nobody wrote is NaN."""

    def __init__(self, name, flat, backend, blocks):
        cfg, self.name, self.flat, self.backend = flat.cfg, name, flat, backend
        shape = (blocks + 1, SIZE, cfg.num_key_value_heads, cfg.head_dim)
        self.caches = [
            tuple(torch.full(shape, torch.nan, dtype=flat.dtype, device=flat.device) for _ in "kv")
            for _ in range(cfg.num_hidden_layers)
        ]

    @torch.inference_mode()
    def step(self, ids, positions, meta):
        ids, positions = (x.to(self.flat.device) for x in (ids, positions))
        return self.flat.forward(ids, positions, self.caches, meta, self.backend)


def moved(meta, device):
    for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
        setattr(meta, name, getattr(meta, name).to(device))
    return meta


class Steps:
    """Requests computed step by step by a plain model on the CPU and by a fused one."""

    def __init__(self, salt, lengths, tables, make_ops, make_backend, device, dtype=torch.float32, **changes):
        weights, self.dtype = model_of(salt, **changes).to(dtype), dtype
        self.sequences, self.tables = sequences(salt, VOCABULARY, lengths), tables
        self.exact = [with_tolerances(weights, s, dtype) for s in self.sequences]
        blocks = max(map(max, tables)) + 2
        fused = FusedModel(copy.deepcopy(weights).to(device), make_ops())
        sides = [Side("fused", fused, make_backend(), blocks)]
        if dtype == torch.float32:
            sides.append(Side("plain", FlatModel(weights), PlainBackend(), blocks))
        self.sides, self.written = sides, {}

    def step(self, spans, padding=0):
        """spans: {request: (first position, end)}; hidden states and pools of either side against float64."""
        shapes = [(end, end - begin) for begin, end in spans.values()]
        ids = [t for r, (begin, end) in spans.items() for t in self.sequences[r][begin:end]]
        ids = torch.tensor(ids + [0] * padding)
        for r, (begin, end) in spans.items():
            for p in range(begin, end):
                self.written[self.tables[r][p // SIZE] * SIZE + p % SIZE] = r, p
        for side in self.sides:
            tables = [self.tables[r] for r in spans]
            meta = moved(meta_of(shapes, SIZE, tables, padding), side.flat.device)
            hidden = side.step(ids, positions_of(shapes, padding), meta)
            parts = hidden.split([t for _, t in shapes] + [1] * padding)
            for (r, (begin, end)), got in zip(spans.items(), parts, strict=False):
                exact, atol = self.exact[r]
                what = f"{side.name} model: hidden state of request {r}, positions {begin}..{end - 1}, at {{i}}"
                expect_close(got, exact[0][begin:end], atol[0], what=what, see=FEWER)
            self.check_pools(side)

    def check_pools(self, side):
        for i, cache in enumerate(side.caches):
            for j, pool in enumerate(cache):
                flat = pool.flatten(0, 1).cpu()
                for slot in range(len(flat) - SIZE):  # the last block is scratch
                    what = f"{side.name} model: {'kv'[j]}_cache of layer {i}, slot {slot}"
                    if slot not in self.written:
                        expect(flat[slot].isnan().all(), f"{what} was written and is no row's", see=FEWER)
                        continue
                    r, p = self.written[slot]
                    exact, atol = self.exact[r]
                    k = 1 + 2 * i + j
                    expect_close(flat[slot], exact[k][p], atol[k], what=f"{what} [head, d] {{i}}", see=FEWER)


def three_steps(steps):
    """Prompts and a chunk; a decode beside the next chunk and a whole prompt, with padding; a decode alone."""
    steps.step({0: (0, 5), 1: (0, 6)})
    steps.step({1: (6, 7), 0: (5, 10), 2: (0, 9)}, padding=2)
    steps.step({0: (10, 11)}, padding=1)


LENGTHS, TABLES = (11, 7, 9), [[6, 2, 4], [0, 5], [7, 1, 3]]


@grades(*FUSED)
@pytest.mark.parametrize("kind", KINDS)
def test_fused_steps_equal_plain_ones(kind):
    where = torch.device("cpu")
    three_steps(Steps(f"steps {kind}", LENGTHS, TABLES, PlainOps, PlainBackend, where, **KINDS[kind]))


@grades(*FUSED)
def test_a_fused_model_unfused_is_the_plain_one_to_the_last_bit():
    weights = model_of("unfused", attention_bias=True)
    ids, meta = torch.tensor([3, 1, 4, 1]), meta_of([(4, 4)], SIZE, [[1]])

    def run(flat):
        return Side("", flat, PlainBackend(), 3).step(ids, torch.arange(4), meta)

    plain = run(FlatModel(weights))
    fused = FlatModel(weights).fuse()
    exact, atol = with_tolerances(weights, ids.tolist(), torch.float32)
    expect_close(run(fused), exact[0], atol[0], what="hidden states of the fused model, {i}", see=FEWER)
    expect_close(run(fused.unfuse()), plain, 0.0, what="hidden states after unfuse(), {i}", see=FEWER)
    expect_close(run(fused.unfuse().fuse()), exact[0], atol[0], what="hidden states, fused again, {i}", see=FEWER)


def test_logits_of_a_fused_model_are_float32():
    weights = model_of("logits").to(torch.bfloat16)
    fused, hidden = FusedModel(weights), torch.randn(3, 36, generator=rng.torch("logits")).to(torch.bfloat16)
    expect_equal(str(fused.compute_logits(hidden).dtype), "torch.bfloat16", "dtype of FusedModel.compute_logits")
    meta = moved(meta_of([(4, 4)], SIZE, [[1]]), "cpu")
    batch = Batch(torch.tensor([3, 1, 4, 1]), torch.arange(4), meta, torch.tensor([3]), [1], ["a"])
    logits = fused(batch, Side("", fused, get_backend("reference"), 3).caches, get_backend("reference"))
    expect_equal((list(logits.shape), str(logits.dtype)), ([1, VOCABULARY], "torch.float32"), "logits {i}")


def texts(make_ops, backend, lengths, new, **settings):
    """The core on a fused model gives everybody the text of a plain loop over their prompt alone."""
    random = rng(f"fused {backend}")
    prompts = [decided(random, (), length) for length in lengths]
    config = EngineConfig(**{"num_blocks": 40, "block_size": 8, "attention_backend": backend, **settings})
    core = EngineCore(copy.deepcopy(model()).to(DEVICE), config)
    core.runner.model = FusedModel(core.runner.model.model, make_ops() if make_ops else None)
    got = core.generate(prompts, SamplingParams(max_tokens=new, ignore_eos=True))
    for i, (prompt, output) in enumerate(zip(prompts, got, strict=True)):
        hint = "a full forward pass of the plain model for every token of that prompt alone gives another token"
        what = f"fused, backend {backend}: request {i} (prompt of {len(prompt)} of {VOCAB} tokens), output token {{i}}"
        expect_equal(output.output_token_ids, endless(prompt)[:new], what, hint, CORRECT)


@grades(*FUSED)
@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 5}, {"num_blocks": 8}], ids=str)
def test_the_core_on_a_fused_model_gives_the_same_text(settings):
    texts(PlainOps, "sdpa", [1, 8, 21, 30], 5, **settings)
