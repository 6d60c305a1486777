"""Wrong answers of chapter 5."""

from tests.mutants import mutant

ATTENTION = "causal_attention"
MASK = "k_pos[..., None, :] <= q_pos[..., :, None]"
SOFTMAX = "scores.add_(bias).softmax(dim=-1)"
SCALE = "scale = D**-0.5 if scale is None else scale"
ROWS = "(q.float() * scale)"
BLIND = "~visible.any(dim=-1, keepdim=True)"

# Who sees whom
mutant(ATTENTION, MASK, "k_pos[..., None, :] < q_pos[..., :, None]",
       caught_by="test_a_query_sees_keys_up_to_its_own_position", name="mask-strict",
       believes="a token attends to those before it, not to itself")
mutant(ATTENTION, MASK, "k_pos[..., None, :] <= q_pos[..., :, None] + 1",
       caught_by="test_a_query_sees_keys_up_to_its_own_position", name="mask-one-ahead",
       believes="the query at t predicts t + 1, so it sees it")
mutant(ATTENTION, MASK, "(k_pos[..., None, :] <= q_pos[..., :, None]) | True",
       caught_by="test_a_query_sees_keys_up_to_its_own_position", name="mask-ignored",
       believes="the softmax sorts out what matters")
mutant(ATTENTION, MASK, "torch.arange(S)[None, :] <= torch.arange(T)[:, None] + S - T",
       caught_by="test_positions_in_any_order_shared_or_per_batch", name="index-for-position",
       believes="keys are stored in the order of their positions and the queries are the last ones")
mutant(ATTENTION, MASK, "k_pos.sort().values[..., None, :] <= q_pos[..., :, None]",
       caught_by="test_order_of_the_keys_does_not_matter", name="positions-sorted",
       believes="positions may be put in order without the keys")
mutant(ATTENTION, "visible = visible[:, None]", "visible = visible[:1, None]",
       caught_by="test_positions_in_any_order_shared_or_per_batch", name="first-sequence",
       believes="all sequences of a batch have the same positions")
mutant(ATTENTION, "visible = visible[:, None]", "visible = visible[None]",
       caught_by="test_positions_in_any_order_shared_or_per_batch", name="mask-on-the-head-axis",
       believes="broadcasting finds the batch axis by itself")
mutant(ATTENTION, "visible = visible & allowed", "visible = visible & torch.ones_like(allowed)",
       caught_by="test_allowed_hides_what_positions_would_show", name="allowed-ignored",
       believes="the causal mask is all there is")
mutant(ATTENTION, "visible = visible & allowed", "visible = allowed",
       caught_by="test_allowed_hides_what_positions_would_show", name="allowed-replaces-causal",
       believes="a mask that is given replaces the causal one")
mutant(ATTENTION, "visible = visible & allowed", "visible = visible | allowed",
       caught_by="test_allowed_hides_what_positions_would_show", name="allowed-adds",
       believes="allowed keys are visible in addition to the earlier ones")
mutant(ATTENTION, "visible = visible & allowed", "visible = visible & ~allowed",
       caught_by="test_allowed_hides_what_positions_would_show", name="allowed-inverted",
       believes="True in a mask means masked")

# Scores
mutant(ATTENTION, ROWS, "q.float()", caught_by="test_scale", name="scale-missing",
       believes="the softmax normalises anyway")
mutant(ATTENTION, ROWS, "(q.float() * scale * scale)", caught_by="test_scale", name="scale-twice",
       believes="queries and keys are each scaled by the full factor")
mutant(ATTENTION, SCALE, "scale = 1 / D if scale is None else scale", caught_by="test_scale", name="scale-one-over-D",
       believes="a dot product of D terms is averaged by dividing by D")
mutant(ATTENTION, SCALE, "scale = D**-0.5 * (1 if scale is None else scale)", caught_by="test_scale",
       name="scale-on-top", believes="a given scale multiplies the default")
mutant(ATTENTION, SCALE, "scale = scale or D**-0.5", caught_by="test_scale", name="scale-zero-is-unset",
       believes="`or` tells None from a number")
mutant(ATTENTION, ROWS, "q.float().mul_(scale)", caught_by="test_any_strides_and_arguments_unchanged",
       name="scale-in-place", believes=".float() always makes a copy")

# Heads
mutant(ATTENTION, SCALE, SCALE + "; k, v = (x.repeat(1, H // Hkv, 1, 1) for x in (k, v)); Hkv = H",
       caught_by="test_query_head_reads_the_kv_head_of_its_group", name="heads-tiled",
       believes="query head h reads KV head h % Hkv")
mutant(ATTENTION, SCALE, SCALE + "; k, v = (x.repeat_interleave(H // Hkv, dim=1) for x in (k, v)); Hkv = H",
       caught_by="test_keys_and_values_are_not_copied_per_query_head", name="heads-repeated",
       believes="repeating K and V is free")
mutant(ATTENTION, SCALE, SCALE + "; k, v = (x[:, :1].expand(x.shape) for x in (k, v))",
       caught_by="test_query_head_reads_the_kv_head_of_its_group", name="first-kv-head",
       believes="grouped heads all share one KV head")

# Softmax
mutant(ATTENTION, SOFTMAX, "scores.add_(bias).to(q.dtype).softmax(dim=-1).float()",
       caught_by="test_softmax_in_float32_output_in_the_dtype_of_q", name="softmax-in-low-precision",
       believes="a softmax in the dtype of the model is good enough")
mutant(ATTENTION, "k.float().transpose(-1, -2))", "k.float().transpose(-1, -2)).to(q.dtype).float()",
       caught_by="test_softmax_in_float32_output_in_the_dtype_of_q", name="scores-in-low-precision",
       believes="only the softmax needs float32, its input does not")
mutant(ATTENTION, SOFTMAX, "scores.add_(bias).softmax(dim=-2)", caught_by="test_weights_of_a_query_sum_to_one",
       name="softmax-over-queries", believes="either of the last two axes will do")
mutant(ATTENTION, SOFTMAX, "scores.add_(bias).softmax(dim=1)", caught_by="test_weights_of_a_query_sum_to_one",
       name="softmax-over-heads", believes="axis 1 holds the keys")
mutant(ATTENTION, SOFTMAX, "scores.softmax(dim=-1) * visible", caught_by="test_weights_of_a_query_sum_to_one",
       name="mask-after-softmax", believes="hidden weights can be zeroed after they were normalised")
mutant(ATTENTION, "LOWEST)", "-1e4)", caught_by="test_hidden_keys_have_no_influence", name="mask-too-weak",
       believes="minus ten thousand is as good as minus infinity")

# Output
mutant(ATTENTION, f".masked_fill_({BLIND}, 0.0)", "", caught_by="test_a_query_that_sees_nothing_gives_zeros",
       name="blind-rows-average", believes="a row without keys never occurs")
mutant(ATTENTION, BLIND, "~visible.any()", caught_by="test_a_query_that_sees_nothing_gives_zeros",
       name="blind-only-as-a-whole", believes="either all queries see something or none does")
mutant(ATTENTION, f".masked_fill_({BLIND}, 0.0)", ".div_(visible.any(dim=-1, keepdim=True))",
       caught_by="test_a_query_that_sees_nothing_gives_zeros", name="blind-rows-infinite",
       believes="dividing by a sum of weights that is zero gives zero")
mutant(ATTENTION, ".to(q.dtype)", "", caught_by="test_softmax_in_float32_output_in_the_dtype_of_q",
       name="float32-output", believes="the caller converts")

# Refusals
mutant(ATTENTION, "if Hkv == 0 or H % Hkv:", "if Hkv == 0:", caught_by="test_refusals", name="any-number-of-heads",
       believes="an odd number of heads is somebody else's problem")
mutant(ATTENTION, "allowed.dtype != torch.bool or not fits", "not fits", caught_by="test_refusals",
       name="allowed-of-any-dtype", believes="numbers to be added to the scores work as a mask, too")
mutant(ATTENTION, "not in ((n,), (B, n))", "[-1:] != (n,)", caught_by="test_refusals", name="any-batch-of-positions",
       believes="the last axis of the positions is all that matters")
