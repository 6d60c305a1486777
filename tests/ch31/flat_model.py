"""FlatModel.forward layer by layer, and both exercises together against the model's own forward pass."""

import pytest
import torch
from torch import nn

from engine.serve.flat import FlatModel
from tests.ch31.flat_layers import KINDS
from tests.ch31.plain_model import angles, mlp, model_of, rms_norm, with_tolerance
from tests.ch31.ragged import UNIT, meta_of, plain_attention, positions_of
from tests.grading import expect, expect_close, expect_equal, grades, rng

FLAT = "31: The flat model"
ROUNDINGS = 400  # more than the terms of any sum on the way through three small layers


class Probe(FlatModel):
    """A flat model with another attention: it notes its arguments and answers with a tensor that nothing else makes."""

    def attention(self, attn, hidden_states, cos, sin, cache, meta, backend):
        self.calls.append((attn, hidden_states.clone(), cos, sin, cache, meta, backend))
        return self.answers[len(self.calls) - 1]


class RowsOnly(nn.Module):
    """A feed-forward part that takes [N, hidden] and nothing else, as a mixture of experts does."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        message = f"FlatModel.forward calls layer.mlp with shape {list(x.shape)}, not [N, hidden]"
        expect(x.ndim == 2, message, "a mixture of experts routes rows", FLAT)
        return self.inner(x)


class Pass:
    """One call of `forward`: a later chunk, a decode, a prompt, and a padding row."""

    def __init__(self, salt, rows_only=False, **changes):
        random, generator = rng(salt), rng.torch(salt)
        shapes = [(9, 3), (70, 1), (4, 4)]
        self.model = model_of(salt, **changes)
        layers, cfg = self.model.model.layers, self.model.cfg
        if rows_only:
            for layer in layers:
                layer.mlp = RowsOnly(layer.mlp)
        self.positions = positions_of(shapes, padding=1)
        self.ids = torch.tensor([random.randrange(cfg.vocab_size) for _ in self.positions])
        tables = [[0, 1, 2], [*range(3, 21)], [21]]
        self.meta, self.backend = meta_of(shapes, 4, tables, padding=1), object()
        self.caches = [object() for _ in layers]
        probe = Probe(self.model)
        probe.calls = self.calls = []
        probe.answers = self.answers = torch.randn(len(layers) + 9, len(self.ids), cfg.hidden_size, generator=generator)
        self.got = probe.forward(self.ids, self.positions, self.caches, self.meta, self.backend)
        expect_equal(len(self.calls), len(layers), what="calls of self.attention", hint="one a layer", see=FLAT)

    def expected(self):
        """The normalised input of each attention, and the result, in float64."""
        hidden, inputs = self.model.model.embed_tokens.weight[self.ids].double(), []
        for layer, answer in zip(self.model.model.layers, self.answers.double(), strict=False):
            inputs.append(rms_norm(layer.input_layernorm, hidden))
            hidden = hidden + answer
            feed_forward = layer.mlp.inner if isinstance(layer.mlp, RowsOnly) else layer.mlp
            hidden = hidden + mlp(feed_forward, rms_norm(layer.post_attention_layernorm, hidden))
        return inputs, rms_norm(self.model.model.norm, hidden)


def atol(exact):
    """Worst sums of `ROUNDINGS` terms, each as large as the largest value that goes through."""
    return ROUNDINGS * UNIT * 8 * exact.abs().max().item()


@grades(FlatModel.forward)
@pytest.mark.parametrize("kind", KINDS)
def test_each_layer_norms_attends_and_adds(kind):
    run = Pass(f"layers {kind}", **KINDS[kind])
    inputs, result = run.expected()
    for i, (call, exact) in enumerate(zip(run.calls, inputs, strict=True)):
        hint = "input_layernorm before attention; both residuals take the un-normalised value"
        expect_close(call[1], exact, atol(exact), what=f"what attention of layer {i} gets, {{i}}", hint=hint, see=FLAT)
    hint = "post_attention_layernorm before the MLP, both residuals, model.norm at the end, no LM head"
    expect_close(run.got, result, atol(result), what="result [N, hidden] {i}", hint=hint, see=FLAT)


@grades(FlatModel.forward)
def test_each_layer_has_its_own_cache_and_attention():
    run = Pass("caches")
    for i, (layer, call) in enumerate(zip(run.model.model.layers, run.calls, strict=True)):
        expect(call[0] is layer.self_attn, f"call {i} of attention got another layer's self_attn", see=FLAT)
        expect(call[4] is run.caches[i], f"layer {i} got a cache other than kv_caches[{i}]", "one cache a layer", FLAT)
        expect(call[5] is run.meta, f"layer {i} got another meta than the step's", see=FLAT)
        expect(call[6] is run.backend, f"layer {i} got another backend than the step's", see=FLAT)


@grades(FlatModel.forward)
def test_angles_come_from_positions_not_from_row_numbers():
    """Rows of a later chunk, of a decode at position 69 and of a prompt stand side by side."""
    for changes in ({}, {"rope_theta": 30.0, "head_dim": 6}):
        run = Pass("positions", **changes)
        cfg = run.model.cfg
        angle = angles(run.positions, cfg.head_dim, cfg.rope_theta).repeat(1, 2)
        allowed = (8 * run.positions.max().item() + 8) * UNIT  # the angle, and so its cosine, is off by some units
        for i, call in enumerate(run.calls):
            for name, got, exact in (("cos", call[2], angle.cos()), ("sin", call[3], angle.sin())):
                what = f"{name} [N, D] of layer {i}, {{i}}"
                hint = "rope_cos_sin(positions, cfg.head_dim, cfg.rope_theta)"
                expect_close(got, exact, allowed, what=what, hint=hint, see=FLAT)


@grades(FlatModel.forward)
def test_rope_tables_are_made_once_a_step():
    run = Pass("once")
    for i, call in enumerate(run.calls[1:], 1):
        same = call[2] is run.calls[0][2] and call[3] is run.calls[0][3]
        expect(same, f"layer {i} got other cos and sin tensors than layer 0", "the angles are those of the step", FLAT)


@grades(FlatModel.forward)
def test_a_feed_forward_part_of_rows_runs_unchanged():
    run = Pass("rows only", rows_only=True)
    result = run.expected()[1]
    expect_close(run.got, result, atol(result), what="result with an MLP of rows, {i}", see=FLAT)


class PlainBackend:
    """Block pools as plain tensors, attention in float64, one row after the other."""

    def write(self, cache, k, v, meta):
        for row, slot in enumerate(meta.slot_mapping.tolist()):
            for pool, new in zip(cache, (k, v), strict=True):
                if slot >= 0:
                    pool[slot // meta.block_size, slot % meta.block_size] = new[row]

    def forward(self, q, cache, meta, scale=None, window=0):
        starts, lengths = meta.query_start_loc_cpu.tolist(), meta.seq_lens_cpu.tolist()
        shapes = [(s, b - a) for s, a, b in zip(lengths, starts, starts[1:], strict=False) if s]
        real = starts[len(shapes)]
        out = torch.zeros_like(q)
        tables = meta.block_table.tolist()[: len(shapes)]
        out[:real] = plain_attention(q[:real], *cache, shapes, tables, meta.block_size, scale, window)
        return out


class Steps:
    """Requests computed step by step through one pool of plain blocks."""

    def __init__(self, model, sequences, tables, size=4):
        self.model, self.sequences, self.tables, self.size = model, sequences, tables, size
        cfg = model.cfg
        shape = (max(map(max, tables)) + 2, size, cfg.num_key_value_heads, cfg.head_dim)
        self.exact = [with_tolerance(model, sequence) for sequence in sequences]
        self.caches = [tuple(torch.full(shape, torch.nan) for _ in "kv") for _ in model.model.layers]

    def step(self, spans, padding=0):
        """spans: {request: (first position, end)} -> hidden states [t, hidden] of each."""
        shapes = [(end, end - begin) for begin, end in spans.values()]
        meta = meta_of(shapes, self.size, [self.tables[r] for r in spans], padding)
        ids = [t for r, (begin, end) in spans.items() for t in self.sequences[r][begin:end]]
        ids = torch.tensor(ids + [0] * padding)
        args = (ids, positions_of(shapes, padding), self.caches, meta, PlainBackend())
        hidden = FlatModel(self.model).forward(*args)
        return dict(zip(spans, hidden.split([t for _, t in shapes] + [1] * padding), strict=False))

    def check(self, spans, padding=0):
        for r, got in self.step(spans, padding).items():
            (begin, end), (exact, atol) = spans[r], self.exact[r]
            what = f"hidden state of request {r}, positions {begin}..{end - 1}, at {{i}}"
            expect_close(got, exact[begin:end], atol, what=what, see=FLAT)
            own = self.model.model(torch.tensor([self.sequences[r][:end]]))[0, begin:]
            what += ", against the model's own forward"
            expect_close(got, own, 2 * atol, what=what, see=FLAT)


def sequences(salt, vocab, lengths):
    random = rng(salt)
    return [[random.randrange(vocab) for _ in range(n)] for n in lengths]


@grades(FlatModel.attention, FlatModel.forward)
@pytest.mark.parametrize("kind", KINDS)
def test_flat_rows_equal_the_models_own_forward(kind):
    """A prompt in chunks beside whole prompts and decodes, padding at the end; each against its own full pass."""
    model = model_of(f"flat {kind}", **KINDS[kind])
    steps = Steps(model, sequences(f"flat {kind}", 83, (11, 7, 9)), [[6, 2, 4], [0, 5], [7, 1, 3]])
    steps.check({0: (0, 5), 1: (0, 6)})
    steps.check({1: (6, 7), 0: (5, 10), 2: (0, 9)}, padding=2)
    steps.check({0: (10, 11)}, padding=1)  # the first decode (case 27)


@grades(FlatModel.attention, FlatModel.forward)
def test_a_request_reads_a_prefix_that_another_writes_in_the_same_step():
    """Both arrived together; the second adopted the blocks that the first one fills in this very step."""
    model = model_of("same step")
    first, tail = sequences("same step", 83, (10, 5))
    steps = Steps(model, [first, first[:8] + tail], [[4, 1, 3], [4, 1, 0, 2]])
    steps.check({0: (0, 10), 1: (8, 13)})
    steps = Steps(model, [first, first[:8] + tail], [[4, 1, 3], [4, 1, 0, 2]])
    steps.check({1: (8, 13), 0: (0, 10)})  # in whatever order their rows stand


# Given: what surrounds the exercises.


def test_logits_are_float32():
    model = model_of("logits").to(torch.bfloat16)
    logits = FlatModel(model).compute_logits(torch.randn(3, 36, generator=rng.torch("logits")).to(torch.bfloat16))
    expect_equal((list(logits.shape), str(logits.dtype)), ([3, 83], "torch.float32"), what="logits {i}")


def test_a_flat_model_uses_the_models_own_weights():
    model = model_of("own weights")
    flat = FlatModel(model)
    expect(flat.model is model and flat.cfg is model.cfg, "FlatModel copied the model")
    expect_equal((flat.dtype, flat.device.type), (torch.float32, "cpu"), what="dtype and device")
