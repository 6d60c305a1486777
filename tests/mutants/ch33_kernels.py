"""Wrong answers of chapter 33's first half: the fused kernels, merged projections, sampling on the device."""

from tests.mutants import mutant, scaffold_mutant


def wrong(exercise, name, old, new, caught_by, believes):
    mutant(exercise, old, new, caught_by=caught_by, believes=believes, name=name)


ORDER, VIEWS = "test_layers_lie_one_below_the_other", "test_every_layer_is_a_view_of_the_whole"
REFUSED, STATE = "test_layers_that_do_not_fit_are_refused_untouched", "test_a_state_dict_loads_through_the_parts"
SET = "linear.register_parameter(name, nn.Parameter(part, requires_grad=False))"

wrong("merge_linears", "copies", SET, SET.replace("(part,", "(part.clone(),"), VIEWS, "equal numbers will do")
wrong("merge_linears", "left-alone", SET, "pass", STATE, "the layers may keep their memory")
wrong("merge_linears", "backwards", "for linear in linears])\n", "for linear in linears[::-1]])\n", ORDER,
      "any order will do")  # fmt: skip
wrong("merge_linears", "no-bias", "None if linears[0].bias is None else merge(\"bias\")", "None", ORDER,
      "these layers have no bias")  # fmt: skip
wrong("merge_linears", "zero-bias", "None if linears[0].bias is None else merge(\"bias\")",
      "merge(\"bias\") if linears[0].bias is not None else merge(\"weight\").new_zeros(sum(sizes))", ORDER,
      "a bias of zeros is no bias")  # fmt: skip
wrong("merge_linears", "gradients", "requires_grad=False", "requires_grad=True", VIEWS, "a parameter has a gradient")
wrong("merge_linears", "equal-shares", "whole.split(sizes)", "whole.chunk(len(sizes))", VIEWS,
      "all parts are of one size")  # fmt: skip
wrong("merge_linears", "transposed", "        return whole\n",
      "        return whole.t() if name == \"weight\" else whole\n", ORDER,
      "F.linear multiplies by the weight as it is")  # fmt: skip
wrong("merge_linears", "float32", ".detach() for linear", ".detach().float() for linear", ORDER,
      "weights are float32")  # fmt: skip
wrong("merge_linears", "some-biases", "if len({linear.bias is None for linear in linears}) > 1:", "if False:", REFUSED,
      "all have a bias or none has")  # fmt: skip
wrong("merge_linears", "some-biases-seen-late", "if len({linear.bias is None for linear in linears}) > 1:",
      "merged = torch.cat([linear.weight.detach() for linear in linears])\n"
      "    for linear, part in zip(linears, merged.split([linear.out_features for linear in linears])):\n"
      "        linear.weight = nn.Parameter(part, requires_grad=False)\n"
      "    if len({linear.bias is None for linear in linears}) > 1:", REFUSED,
      "a refused call may have begun")  # fmt: skip
wrong("merge_linears", "two-copies", "torch.cat([linear.get_parameter(name).detach() for linear in linears])",
      "torch.cat([linear.get_parameter(name).detach() for linear in linears] * 2)[: sum(sizes)]", VIEWS,
      "what lies behind a view costs nothing")  # fmt: skip

NORMED, NARROW = "test_rows_are_added_and_normed", "test_the_norm_is_that_of_what_was_stored"
NO_X, EPS = "test_without_x_the_residual_is_only_read", "test_eps_stands_inside_the_root"
ADD = "add_norm_kernel"
wrong(ADD, "no-eps", " / WIDTH + eps)", " / WIDTH)", EPS, "eps is too small to matter")
wrong(ADD, "eps-outside", "tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)",
      "(1 / (tl.sqrt(tl.sum(wide * wide, 0) / WIDTH) + eps))", EPS, "eps keeps the divisor from being 0")  # fmt: skip
wrong(ADD, "padded-mean", "/ WIDTH + eps", "/ COLS + eps", NORMED, "the power of two is the width")
wrong(ADD, "no-mean", "/ WIDTH + eps", "+ eps", NORMED, "the root of the sum, not of the mean")
wrong(ADD, "centred", "    wide = total.to(tl.float32)\n",
      "    wide = total.to(tl.float32)\n    wide = tl.where(used, wide - tl.sum(wide, 0) / WIDTH, 0.0)\n", NORMED,
      "a norm takes the mean off first")  # fmt: skip
wrong(ADD, "one-rounding", ".to(total.dtype).to(tl.float32)\n", "\n", NORMED,
      "one rounding at the end is more exact")  # fmt: skip
wrong(ADD, "norm-of-the-unrounded", ".to(tl.float32)).to(total.dtype)\n", ".to(tl.float32))\n", NARROW,
      "the sum in float32 is the better one to norm")  # fmt: skip
wrong(ADD, "sum-not-stored", "        tl.store(residual + place, total, mask=used)\n", "", NORMED,
      "normed is the result")  # fmt: skip
wrong(ADD, "stored-in-x", "tl.store(residual + place, total", "tl.store(x + place, total", NORMED,
      "x becomes the sum")  # fmt: skip
wrong(ADD, "residual-is-normed", "tl.store(normed + place, (scaled",
      "tl.store(residual + place, (scaled * factor).to(total.dtype), mask=used)\n    tl.store(normed + place, (scaled",
      NO_X, "the residual goes on normed")  # fmt: skip
wrong(ADD, "x-always-read", "    if ADD:\n", "    if WIDTH > 0:\n", NO_X, "x is always there")
wrong(ADD, "runs-over", "place, used = n * WIDTH + d, d < WIDTH", "place, used = n * WIDTH + d, d < COLS", NORMED,
      "the power of two is the width")  # fmt: skip
wrong(ADD, "padded-rows", "n * WIDTH + d, d", "n * COLS + d, d", NORMED, "rows are a power of two apart")
wrong(ADD, "squares-in-the-type", "tl.sum(wide * wide, 0)", "tl.sum((wide * wide).to(total.dtype).to(tl.float32), 0)",
      "test_squares_of_large_values_fit", "the type of the model will do for a square")  # fmt: skip
wrong(ADD, "one-plus-weight", "other=0.0).to(tl.float32)\n    tl.store(normed",
      "other=0.0).to(tl.float32) + 1\n    tl.store(normed", NORMED,
      "weights are stored less 1, as in Gemma")  # fmt: skip

HEADS, PADDING = "test_heads_are_normed_turned_and_stored", "test_padding_has_queries_and_no_slot"
ROWS = "test_rows_go_to_their_own_slots"
ROUND, ROPE = "test_heads_are_rounded_where_the_model_rounds", "rope_write_kernel"
wrong(ROPE, "pairs-side-by-side", "place = q + (n * HEADS + h) * WIDTH + i\n        tl.store(place, x1, used)\n"
      "        tl.store(place + HALF, x2, used)", "place = q + (n * HEADS + h) * WIDTH + 2 * i\n"
      "        tl.store(place, x1, used)\n        tl.store(place + 1, x2, used)", HEADS,
      "pairs are neighbours")  # fmt: skip
wrong(ROPE, "turned-back", "(y1 * c - y2 * s).to(x1.dtype), (y2 * c + y1 * s)",
      "(y1 * c + y2 * s).to(x1.dtype), (y2 * c - y1 * s)", HEADS, "the other direction")  # fmt: skip
wrong(ROPE, "keys-not-normed", "        if NORM:\n", "        if NORM and h < HEADS:\n", HEADS,
      "only queries have a norm")  # fmt: skip
wrong(ROPE, "one-weight", "            if h < HEADS:\n                weight = q_weight\n", "", HEADS,
      "both norms have the same weight")  # fmt: skip
wrong(ROPE, "half-a-mean", "(tl.sum(y1 * y1, 0) + tl.sum(y2 * y2, 0)) / WIDTH", "tl.sum(y1 * y1, 0) / HALF", HEADS,
      "half of a head will do for the mean")  # fmt: skip
wrong(ROPE, "no-eps", " / WIDTH + eps)", " / WIDTH)", "test_the_norm_of_a_head_has_its_eps",
      "eps is too small to matter")  # fmt: skip
wrong(ROPE, "weights-of-the-first-half", "tl.load(weight + i + HALF, used", "tl.load(weight + i, used", HEADS,
      "the weights repeat as cos and sin do")  # fmt: skip
wrong(ROPE, "always-normed", "        if NORM:\n", "        if WIDTH > 0:\n", "test_heads_of_llama_are_only_turned",
      "every model has head norms")  # fmt: skip
wrong(ROPE, "values-turned", "    if h < HEADS + KV_HEADS:\n        y1, y2 =",
      "    if h < HEADS + 2 * KV_HEADS:\n        y1, y2 =", HEADS, "all heads are turned")  # fmt: skip
wrong(ROPE, "unrounded-norm", "(y1 * factor).to(x1.dtype).to(tl.float32), (y2 * factor).to(x1.dtype).to(tl.float32)",
      "y1 * factor, y2 * factor", ROUND, "one rounding at the end is more exact")  # fmt: skip
wrong(ROPE, "turned-in-the-type", "c, s = tl.load(cos + n * WIDTH + i, used), tl.load(sin + n * WIDTH + i, used)",
      "c = tl.load(cos + n * WIDTH + i, used).to(x1.dtype).to(tl.float32)\n"
      "        s = tl.load(sin + n * WIDTH + i, used).to(x1.dtype).to(tl.float32)", ROUND,
      "the tables may have the model's type")  # fmt: skip
wrong(ROPE, "angles-of-the-first-row", "c, s = tl.load(cos + n * WIDTH + i, used), tl.load(sin + n * WIDTH + i, used)",
      "c, s = tl.load(cos + i, used), tl.load(sin + i, used)", HEADS, "there is one position")  # fmt: skip
wrong(ROPE, "before-the-pool", "tl.store(target, x1.to(pool.dtype.element_ty), used & (slot >= 0))",
      "tl.store(target, x1.to(pool.dtype.element_ty), used)", PADDING, "a negative offset is no store")  # fmt: skip
wrong(ROPE, "slot-zero", "slot, kv_head = tl.load(slot_mapping + n), (h",
      "slot, kv_head = tl.maximum(tl.load(slot_mapping + n), 0), (h", PADDING, "slot 0 is nobody's")  # fmt: skip
wrong(ROPE, "no-queries-for-padding", "        tl.store(place, x1, used)\n        tl.store(place + HALF, x2, used)\n",
      "        here = used & (tl.load(slot_mapping + n) >= 0)\n        tl.store(place, x1, here)\n"
      "        tl.store(place + HALF, x2, here)\n", PADDING, "padding has no query")  # fmt: skip
wrong(ROPE, "row-for-slot", "(slot * KV_HEADS + kv_head)", "(tl.where(slot < 0, slot, n) * KV_HEADS + kv_head)", ROWS,
      "row n goes to slot n")  # fmt: skip
wrong(ROPE, "values-among-keys",
      "        pool = v_cache\n        if h < HEADS + KV_HEADS:\n            pool = k_cache\n",
      "        pool = v_cache\n        if h >= HEADS + KV_HEADS:\n            pool = k_cache\n", HEADS,
      "V comes before K")  # fmt: skip
wrong(ROPE, "first-kv-head", "(slot * KV_HEADS + kv_head)", "(slot * KV_HEADS)", HEADS, "there is one KV head")
wrong(ROPE, "runs-over", "used = i < HALF", "used = i < COLS", HEADS, "half a head is a power of two")

STRETCH, SIZES, SWIGLU = "test_stretches_of_a_row", "test_gates_of_any_size", "swiglu_kernel"
wrong(SWIGLU, "gate-and-up-swapped", "wide = gate.to(tl.float32)",
      "gate, up = up, gate\n    wide = gate.to(tl.float32)", STRETCH, "up comes first")  # fmt: skip
wrong(SWIGLU, "no-silu", "(wide / (1 + tl.exp(-wide)))", "(1 / (1 + tl.exp(-wide)))", STRETCH, "the gate is a sigmoid")
wrong(SWIGLU, "sign", "tl.exp(-wide)", "tl.exp(wide)", STRETCH, "exp(a) and exp(-a) are the same by symmetry")
wrong(SWIGLU, "overflow", "(wide / (1 + tl.exp(-wide)))", "(wide * tl.exp(wide) / (1 + tl.exp(wide)))", SIZES,
      "a e^a / (1 + e^a) is the same number")  # fmt: skip
wrong(SWIGLU, "one-rounding", ".to(gate.dtype).to(tl.float32)\n", "\n", "test_silu_is_rounded_before_it_meets_up",
      "one rounding at the end is more exact")  # fmt: skip
wrong(SWIGLU, "one-stretch", "tl.program_id(1) * COLS + tl.arange(0, COLS)", "tl.arange(0, COLS)", STRETCH,
      "a row is one stretch")  # fmt: skip
wrong(SWIGLU, "runs-over", "used = i < WIDTH", "used = i < 2 * WIDTH", STRETCH, "the last stretch ends with the row")
wrong(SWIGLU, "rows-one-width-apart", "gate_up + n * 2 * WIDTH + i,", "gate_up + n * WIDTH + i,", STRETCH,
      "rows are WIDTH apart")  # fmt: skip
wrong(SWIGLU, "columns-interleaved", "gate_up + n * 2 * WIDTH + WIDTH + i", "gate_up + n * 2 * WIDTH + 2 * i", STRETCH,
      "gate and up take turns")  # fmt: skip
wrong(SWIGLU, "silu-of-up", "up.to(tl.float32))", "(up.to(tl.float32) / (1 + tl.exp(-up.to(tl.float32)))))", STRETCH,
      "both branches go through silu")  # fmt: skip

ATTENTION = "FusedModel.attention"
PROJECTION, AFTER = "test_one_projection_goes_to_rope_write", "test_queries_attend_after_the_write"
O_PROJ = "test_heads_go_through_o_proj"
SCALE, STEPS = "test_fused_attention_has_the_scale_of_the_layer", "test_fused_steps_equal_plain_ones"
wrong(ATTENTION, "three-projections", "self.ops.linear(hidden_states, *self.merged[attn])",
      "torch.cat([p(hidden_states) for p in (attn.q_proj, attn.k_proj, attn.v_proj)], 1)",
      "test_two_matrix_products_are_enough", "the parts side by side are the same")  # fmt: skip
wrong(ATTENTION, "products-of-its-own",
      "self.ops.linear(out.reshape(len(out), -1), attn.o_proj.weight, attn.o_proj.bias)",
      "attn.o_proj(out.reshape(len(out), -1))", "test_both_products_are_operations",
      "a product is a product")  # fmt: skip
wrong(ATTENTION, "no-bias", "*self.merged[attn])", "self.merged[attn][0])", PROJECTION, "projections have no bias")
wrong(ATTENTION, "no-scale", ", scale=attn.scale)", ")", SCALE, "the default scale is everybody's")
wrong(ATTENTION, "no-o-proj", "self.ops.linear(out.reshape(len(out), -1), attn.o_proj.weight, attn.o_proj.bias)",
      "out.reshape(len(out), -1)[:, : hidden_states.shape[1]]", O_PROJ, "attention ends with the heads")  # fmt: skip
wrong(ATTENTION, "residual-added", "attn.o_proj.weight, attn.o_proj.bias)",
      "attn.o_proj.weight, attn.o_proj.bias) + hidden_states", O_PROJ, "attention adds its input")  # fmt: skip
wrong(ATTENTION, "heads-mixed", "out.reshape(len(out), -1)", "out.transpose(1, 2).reshape(len(out), -1)", O_PROJ,
      "the order of the heads is all one")  # fmt: skip
wrong(ATTENTION, "unturned-queries", "backend.forward(q, cache",
      "backend.forward(qkv[:, : q[0].numel()].view(q.shape), cache", AFTER,
      "q is the first part of the projection")  # fmt: skip
wrong(ATTENTION, "written-twice", "        out = backend.forward(",
      "        backend.write(cache, q[:, : attn.num_kv_heads], q[:, : attn.num_kv_heads], meta)\n"
      "        out = backend.forward(",
      AFTER, "the backend writes, as before")  # fmt: skip
wrong(ATTENTION, "sin-cos", "(qkv, cos, sin, attn", "(qkv, sin, cos, attn", PROJECTION, "sin comes first")
wrong(ATTENTION, "normed-twice", "hidden_states, *self.merged[attn])",
      "F.layer_norm(hidden_states, hidden_states.shape[1:]), *self.merged[attn])", PROJECTION,
      "attention norms its input")  # fmt: skip

FORWARD = "FusedModel.forward"
HALF, SUM = "test_each_half_gets_the_normed_sum", "test_every_sum_is_part_of_a_norm"
OWN, ANGLES = "test_each_half_has_its_own_modules_and_cache", "test_fused_angles_come_from_positions"
wrong(FORWARD, "embeddings-twice", "x, residual = None, model.embed_tokens(input_ids)",
      "x = model.embed_tokens(input_ids)\n        residual = x.clone()", HALF,
      "the embeddings are the first x")  # fmt: skip
wrong(FORWARD, "last-half-lost", "self.ops.add_norm(x, residual, model.norm)",
      "self.ops.add_norm(None, residual, model.norm)", HALF, "all has been added already")  # fmt: skip
wrong(FORWARD, "plain-last-norm", "return self.ops.add_norm(x, residual, model.norm)",
      "return model.norm(residual + x)", SUM, "the last sum has no norm of its own to go with")  # fmt: skip
wrong(FORWARD, "plain-sums", "            x = self.mlp(layer.mlp, normed)",
      "            residual = residual + self.mlp(layer.mlp, normed)\n"
      "            x = None", SUM, "a sum may stand by itself")  # fmt: skip
wrong(FORWARD, "attention-added-twice", "            x = self.mlp(layer.mlp, normed)",
      "            x = x + self.mlp(layer.mlp, normed)", HALF, "x goes on through both halves")  # fmt: skip
wrong(FORWARD, "norms-swapped", "residual, layer.input_layernorm)", "residual, layer.post_attention_layernorm)", HALF,
      "both norms are alike")  # fmt: skip
wrong(FORWARD, "no-layer-norm-between", "x = self.mlp(layer.mlp, normed)", "x = self.mlp(layer.mlp, residual)", HALF,
      "the MLP gets the sum")  # fmt: skip
wrong(FORWARD, "residual-is-normed", "            x = self.attention(",
      "            residual = normed.clone()\n            x = self.attention(", HALF,
      "what is added to is the normed value")  # fmt: skip
wrong(FORWARD, "modules-own-mlp", "self.mlp(layer.mlp, normed)", "layer.mlp(normed)", HALF,
      "the layer's MLP is the same")  # fmt: skip
wrong(FORWARD, "first-cache", "normed, cos, sin, cache, meta", "normed, cos, sin, kv_caches[0], meta", OWN,
      "layers share a cache")  # fmt: skip
wrong(FORWARD, "row-numbers", "rope_cos_sin(positions, self", "rope_cos_sin(torch.arange(len(positions)), self", ANGLES,
      "row n stands at position n")  # fmt: skip
wrong(FORWARD, "default-theta", "self.cfg.rope_theta)", "10_000.0)", ANGLES, "theta is 10,000")
wrong(FORWARD, "tables-each-layer", "            normed = self.ops.add_norm(x, residual, layer.input_layernorm)\n",
      "            cos, sin = rope_cos_sin(positions, self.cfg.head_dim, self.cfg.rope_theta)\n"
      "            normed = self.ops.add_norm(x, residual, layer.input_layernorm)\n", ANGLES,
      "tables are cheap")  # fmt: skip

GREEDY, BEST = "test_temperature_zero_takes_the_largest", "test_the_best_of_logit_and_noise"
NOTHING = "test_a_row_with_nothing_to_draw_from_gives_v"
GUMBEL = "gumbel_argmax"
NOISE = "scores[drawn] -= temperatures[drawn, None] * (-uniform.log()).log()"
wrong(GUMBEL, "in-place", "logits.float().clone()", "logits.float()", BEST, "the logits are not needed any more")
wrong(GUMBEL, "one-log", NOISE, "scores[drawn] -= temperatures[drawn, None] * uniform.log()", BEST,
      "-log(u) is the noise")  # fmt: skip
wrong(GUMBEL, "uniform-noise", NOISE, "scores[drawn] += temperatures[drawn, None] * uniform",
      "test_draws_follow_the_softmax", "any noise will do")  # fmt: skip
wrong(GUMBEL, "wrong-sign", NOISE, NOISE.replace("-=", "+="), "test_draws_follow_the_softmax", "noise has no direction")
wrong(GUMBEL, "no-temperature", NOISE, "scores[drawn] -= (-uniform.log()).log()", BEST, "noise has no temperature")
wrong(GUMBEL, "divided", NOISE, "scores[drawn] = scores[drawn] / temperatures[drawn, None] - (-uniform.log()).log()",
      "test_temperatures_of_any_size", "logit / temperature fits into float32")  # fmt: skip
wrong(GUMBEL, "one-number-a-row", "np.arange(vocab)", "np.zeros(vocab)", BEST, "a row needs one random number")
wrong(GUMBEL, "no-place", "places[drawn].numpy())", "np.zeros(len(drawn), dtype=np.int64))", BEST,
      "the seed alone makes the noise")  # fmt: skip
wrong(GUMBEL, "row-for-seed", "seeds[drawn].numpy()", "drawn.numpy()", BEST, "rows have noise of their own")
wrong(GUMBEL, "seeds-of-the-first-rows", "philox(seeds[drawn]", "philox(seeds[: len(drawn)]", BEST,
      "all rows are drawn")  # fmt: skip
wrong(GUMBEL, "greedy-drawn", "(temperatures > 0).nonzero().flatten()",
      "torch.arange(len(scores))\n    temperatures = temperatures.clamp(min=1e-1)", GREEDY,
      "a low temperature is greedy enough")  # fmt: skip
wrong(GUMBEL, "highest-of-equals", "torch.arange(vocab), vocab).amin(dim=1)", "torch.arange(vocab), -1).amax(dim=1)",
      GREEDY, "any of the equals")  # fmt: skip
wrong(GUMBEL, "token-for-nothing", "return torch.where(best > -torch.inf, tokens, vocab)", "return tokens", NOTHING,
      "the lowest of -inf is a token")  # fmt: skip
wrong(GUMBEL, "nan-hidden", "best = scores.amax(dim=1)",
      "scores = torch.where(scores.isnan(), -torch.inf, scores)\n    best = scores.amax(dim=1)", NOTHING,
      "a NaN is no more than a token that cannot come")  # fmt: skip

PARTS, TIES = "test_the_largest_logit_of_each_part", "test_the_lowest_of_equal_logits"
EMPTY, BITS = "test_parts_without_tokens_or_without_numbers", "test_noise_comes_from_seed_token_and_place"
SAMPLE, NAN = "sample_kernel", "test_a_nan_wins_its_part_as_no_token"
SCORE = "score = score - temperature * tl.log(-tl.log(uniform))"
wrong(SAMPLE, "rows-side-by-side", "n * row_stride + token", "n * VOCAB + token", "test_rows_are_a_stride_apart",
      "rows lie side by side")  # fmt: skip
wrong(SAMPLE, "runs-over", "mask=token < VOCAB, other", "mask=token < tiles * PARTS * TILE, other", PARTS,
      "the last tile ends with the row")  # fmt: skip
wrong(SAMPLE, "other-zero", "other=float(\"-inf\")).to", "other=0.0).to", EMPTY, "what is not loaded is 0")
wrong(SAMPLE, "tiles-dealt-out", "token = tile * TILE + tl", "token = (tile % tiles * PARTS + part) * TILE + tl", PARTS,
      "a part takes every PARTS-th tile")  # fmt: skip
wrong(SAMPLE, "rounded-down", "tl.cdiv(tl.cdiv(VOCAB, TILE), PARTS)", "(tl.cdiv(VOCAB, TILE) // PARTS)", PARTS,
      "tiles divide evenly")  # fmt: skip
wrong(SAMPLE, "last-of-equal-tiles", "tl.where(largest > best, first", "tl.where(largest >= best, first", TIES,
      "any of the equals")  # fmt: skip
wrong(SAMPLE, "highest-of-equals", "tl.min(tl.where(number & (score == largest), token, VOCAB), 0)",
      "tl.max(tl.where(number & (score == largest), token, 0), 0)", TIES, "any of the equals")  # fmt: skip
wrong(SAMPLE, "zero-for-nothing", "tl.full([], VOCAB, tl.int32)", "tl.full([], 0, tl.int32)", EMPTY,
      "an empty part has token 0")  # fmt: skip
wrong(SAMPLE, "least-number", "tl.full([], float(\"-inf\"), tl.float32)", "tl.full([], -1e9, tl.float32)", EMPTY,
      "no logit is below -1e9")  # fmt: skip
wrong(SAMPLE, "nan-lost", "score = tl.where(number, score, float(\"inf\"))",
      "score = tl.where(number, score, float(\"-inf\"))", NAN,
      "a NaN is no more than a token that cannot come")  # fmt: skip
wrong(SAMPLE, "nan-taken", "tl.where(number & (score == largest), token", "tl.where(score == largest, token", NAN,
      "a NaN is a token")  # fmt: skip
wrong(SAMPLE, "no-place", "place.to(tl.uint32) + zeros", "zeros", BITS, "the seed alone makes the noise")
wrong(SAMPLE, "place-in-the-seed", "tl.philox(seed, token.to(tl.uint32), place.to(tl.uint32) + zeros",
      "tl.philox(seed + place, token.to(tl.uint32), zeros", BITS, "seed + place is as good a key")  # fmt: skip
wrong(SAMPLE, "token-in-the-tile", "tl.philox(seed, token.to(tl.uint32)",
      "tl.philox(seed, (token % TILE).to(tl.uint32)", BITS, "each tile may have the same noise")  # fmt: skip
wrong(SAMPLE, "second-number", "bits, _, _, _ =", "_, bits, _, _ =", BITS, "any of the four numbers")
wrong(SAMPLE, "half-a-seed", "tl.philox(seed, token", "tl.philox(seed.to(tl.uint32), token", BITS, "a seed has 32 bits")
wrong(SAMPLE, "one-log", SCORE, "score = score - temperature * tl.log(uniform)", BITS, "-log(u) is the noise")
wrong(SAMPLE, "no-temperature", SCORE, "score = score - tl.log(-tl.log(uniform))", BITS, "noise has no temperature")
wrong(SAMPLE, "divided", SCORE, "score = score / temperature - tl.log(-tl.log(uniform))",
      "test_no_temperature_overflows", "logit / temperature fits into float32")  # fmt: skip
wrong(SAMPLE, "always-drawn", "if temperature > 0:",
      "if temperature >= 0:\n            temperature = tl.maximum(temperature, 0.01)", PARTS,
      "a low temperature is greedy enough")  # fmt: skip

SAMPLER, FUSED = "engine/serve/device_sampler.py", "engine/serve/fused.py"
scaffold_mutant(SAMPLER, "(params.top_k > 0 or params.top_p < 1)", "params.top_k > 0",
                "test_filtered_rows_are_those_of_the_simple_sampler", "top_p is no filter",
                "top-p-forgotten")  # fmt: skip
scaffold_mutant(SAMPLER, "    check_drawn(token_ids, logits.shape[1])\n", "    pass\n",
                "test_a_row_with_nothing_to_draw_from_is_refused", "V is a token", "unchecked")  # fmt: skip
scaffold_mutant(SAMPLER, "+ (1 << 63)) % (1 << 64) - (1 << 63)", "% (1 << 63) + 0 * (1 << 63))",
                "test_the_sampler_draws_by_seed_and_place", "seeds are positive", "positive-seeds")  # fmt: skip
scaffold_mutant(SAMPLER, "min(float(params.temperature), HOTTEST)", "float(params.temperature)",
                "test_hot_rows_draw_from_everything", "every temperature fits into float32", "too-hot")  # fmt: skip
scaffold_mutant(SAMPLER, "np.uint64(0x9E3779B9)) & low", "np.uint64(0x9E3779B9))",
                "test_philox_of_any_seed_token_and_place", "keys do not overflow", "key-not-wrapped")  # fmt: skip
scaffold_mutant(FUSED, "parameter.detach().clone(), requires", "parameter.detach(), requires",
                "test_a_fused_model_keeps_its_state_dict_and_its_size", "a new parameter has new memory",
                "split-in-name")  # fmt: skip
scaffold_mutant("engine/serve/kernels/norm.py", "x.contiguous(), residual", "x, residual",
                "test_the_launch_takes_what_the_model_has", "rows lie side by side", "x-with-gaps")  # fmt: skip
scaffold_mutant("engine/serve/kernels/rope.py", "attn.q_norm.eps if norm else 0.0", "1e-6",
                "test_the_launch_takes_a_layers_attention", "eps is 1e-6", "fixed-eps")  # fmt: skip
