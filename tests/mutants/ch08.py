"""Wrong answers of chapter 8."""

from tests.mutants import mutant

GENERATE = "sampling.generate"
DIVIDE = "logits = logits / min(max(temperature, 1e-30), 1e30)"
REACHED = "reached = probs.cumsum(dim=-1)[:, :-1] >= top_p"
CUT = "if top_k:\n            logits = logits[:, :top_k]\n        probs = logits.softmax(dim=-1)"
SORT = "logits.sort(dim=-1, descending=True, stable=True)"
DRAW_RANK = "ids.gather(1, torch.multinomial(probs, 1, generator=generator))"
DRAW_ID = "torch.multinomial(logits.softmax(dim=-1), 1, generator=generator).squeeze(1)"

# sample: temperature and greedy
mutant("sample", DIVIDE, "logits = logits * min(temperature, 1e3)", caught_by="test_shares_follow_the_softmax",
       name="temperature-multiplied", believes="a high temperature sharpens")
mutant("sample", DIVIDE, "pass", caught_by="test_shares_follow_the_softmax", name="temperature-ignored",
       believes="the temperature only tells greedy from random")
mutant("sample", DIVIDE, "logits = logits / temperature", caught_by="test_a_tiny_temperature_is_greedy_without_nan",
       name="temperature-overflows", believes="a quotient of floats is a float")
mutant("sample", "logits.argmax(dim=-1)", "logits.shape[1] - 1 - logits.flip(-1).argmax(dim=-1)", name="last-of-equals",
       caught_by="test_temperature_zero_takes_the_lowest_id_of_equals", believes="any of several equals will do")
mutant("sample", "if temperature == 0:", "if temperature < 0:", caught_by="test_temperature_zero_draws_nothing",
       name="zero-is-just-small", believes="temperature 0 needs no case of its own")
mutant("sample", "if temperature == 0:", "if temperature < 1:", caught_by="test_shares_follow_the_softmax",
       name="below-one-is-greedy", believes="temperatures below 1 are as good as greedy")

# sample: filters
mutant("sample", "logits[:, :top_k]", "logits[:, : top_k + 1]", caught_by="test_top_k_keeps_the_k_largest",
       name="top-k-one-too-many", believes="the token at index k is the k-th")
mutant("sample", REACHED, "reached = probs.cumsum(dim=-1)[:, 1:] >= top_p", name="top-p-one-too-few",
       caught_by="test_top_p_keeps_the_token_that_reaches_it",
       believes="the token that crosses top_p is already outside")
mutant("sample", "probs[:, 1:].masked_fill_(reached, 0.0)", "probs[:, 2:].masked_fill_(reached[:, :-1], 0.0)",
       caught_by="test_top_p_keeps_the_token_that_reaches_it", name="top-p-one-too-many",
       believes="the first token past top_p stays")
mutant("sample", REACHED, "reached = probs[:, 1:] < 1 - top_p", name="top-p-as-a-threshold",
       caught_by="test_top_p_keeps_the_token_that_reaches_it",
       believes="top_p drops tokens less probable than 1 - top_p")
mutant("sample", REACHED, "reached = (logits * temperature).softmax(dim=-1).cumsum(dim=-1)[:, :-1] >= top_p",
       caught_by="test_temperature_comes_before_the_filters", name="temperature-after-top-p",
       believes="top_p counts in the model's own distribution")
mutant("sample", REACHED, "reached = probs.cumsum(dim=-1)[:, :-1] >= (1.0 if top_k else top_p)",
       caught_by="test_top_p_counts_within_what_top_k_left", name="top-p-off-with-top-k",
       believes="top_k and top_p exclude each other")
mutant("sample", CUT, "probs = logits.softmax(dim=-1)\n        if top_k:\n            probs = probs[:, :top_k]",
       caught_by="test_top_p_counts_within_what_top_k_left", name="top-p-of-everything",
       believes="top_p counts in the distribution before top_k")
mutant("sample", SORT, "(x.flip(-1) for x in logits.sort(dim=-1, stable=True))",
       caught_by="test_equal_logits_are_ranked_by_id", name="equals-reversed",
       believes="an ascending sort read backwards is the same as a descending one")
mutant("sample", SORT, "logits.topk(logits.shape[1], dim=-1)", name="topk-for-sort",
       caught_by="test_equals_at_the_edge_of_top_k_in_a_large_vocabulary",
       believes="topk keeps equals in the order of their ids")
mutant("sample", DRAW_RANK, "ids.gather(1, probs.argmax(dim=-1, keepdim=True))", name="argmax-after-filtering",
       caught_by="test_top_k_keeps_the_k_largest", believes="after the filters the best token is what is wanted")
mutant("sample", DRAW_RANK, "torch.multinomial(probs, 1, generator=generator)", name="rank-for-id",
       caught_by="test_each_row_has_its_own_logits", believes="the index that was drawn is the token id")
mutant("sample", DRAW_RANK, "ids[:1].expand_as(ids).gather(1, torch.multinomial(probs, 1, generator=generator))",
       caught_by="test_each_row_has_its_own_logits", name="ids-of-the-first-row",
       believes="all rows of a batch rank the tokens alike")

# sample: randomness
mutant("sample", "torch.multinomial(probs, 1, generator=generator)", "torch.multinomial(probs, 1)",
       caught_by="test_the_generator_is_the_only_source_of_randomness", name="generator-ignored-when-filtering",
       believes="the global seed is enough")
mutant("sample", DRAW_ID, "torch.multinomial(logits.softmax(dim=-1), 1).squeeze(1)", name="generator-ignored",
       caught_by="test_the_generator_is_the_only_source_of_randomness",
       believes="the generator is for the filtered case")
mutant("sample", DRAW_ID, "torch.multinomial(logits.softmax(dim=-1), 1, generator=generator and "
       "generator.manual_seed(generator.initial_seed())).squeeze(1)", name="generator-reseeded",
       caught_by="test_the_generator_is_the_only_source_of_randomness",
       believes="a seeded draw starts from the seed every time")
mutant("sample", DRAW_ID, "torch.multinomial(logits[:1].softmax(dim=-1), len(logits), True, generator=generator)[0]",
       caught_by="test_each_row_has_its_own_logits", name="first-row-for-all",
       believes="several draws are several samples of one distribution")
mutant("sample", DRAW_ID, "(logits.softmax(dim=-1).cumsum(dim=-1) < torch.rand(1, generator=generator)).sum(dim=-1)",
       caught_by="test_rows_of_a_batch_are_drawn_independently", name="one-random-number-for-all-rows",
       believes="one random number serves the whole batch")
mutant("sample", DIVIDE, "logits = logits.div_(min(max(temperature, 1e-30), 1e30))", name="logits-changed",
       caught_by="test_logits_are_left_unchanged", believes=".float() always makes a copy")

# sample: refusals
mutant("sample", "if not 0 < top_p <= 1:", "if not 0 <= top_p <= 1:", caught_by="test_sample_refuses",
       name="top-p-zero", believes="top_p = 0 is a way to say greedy")
mutant("sample", "if not 0 <= temperature < float(\"inf\"):", "if temperature < 0:", caught_by="test_sample_refuses",
       name="temperature-nan", believes="NaN is smaller than 0")
mutant("sample", "if not highest.isfinite().all():", "if highest.isinf().any():", caught_by="test_sample_refuses",
       name="nan-logits", believes="only infinities are a problem")

# generate
mutant(GENERATE, "logits[:, -1]", "logits[:, 0]", caught_by="test_greedy_text_follows_the_last_row", name="first-row",
       believes="the logits come out for the next token only")
mutant(GENERATE, "logits[:, -1]", "logits[:, len(prompt) - 1]", caught_by="test_greedy_text_follows_the_last_row",
       name="last-prompt-row", believes="the row of the last prompt token scores all that follows")
mutant(GENERATE, "while len(new) < max_tokens:", "while len(new) <= max_tokens:", name="one-too-many",
       caught_by="test_max_tokens_counts_new_tokens", believes="the loop ends after max_tokens was passed")
mutant(GENERATE, "while len(new) < max_tokens:", "while len(prompt + new) < max_tokens:", name="prompt-counts",
       caught_by="test_max_tokens_counts_new_tokens", believes="max_tokens limits the whole sequence")
mutant(GENERATE, "new.append(token)\n            if token in stops:\n                break",
       "if token in stops:\n                break\n            new.append(token)", name="end-not-included",
       caught_by="test_end_token_is_kept_and_ends_the_text", believes="the end token is no part of the text")
mutant(GENERATE, "if token in stops:", "if set(prompt + new) & set(stops):", name="end-in-the-prompt",
       caught_by="test_end_token_in_the_prompt_ends_nothing", believes="an end token anywhere ends the text")
mutant(GENERATE, "if eos_token_id is None else", "if not eos_token_id else", name="token-zero-never-ends",
       caught_by="test_token_zero_can_be_the_end", believes="a token id is true")
mutant(GENERATE, "tuple(eos_token_id)", "tuple(eos_token_id)[:1]", name="first-end-token-only",
       caught_by="test_end_token_is_kept_and_ends_the_text", believes="a model has one end token")
mutant(GENERATE, "return new", "return prompt + new", caught_by="test_greedy_text_follows_the_last_row",
       name="prompt-returned", believes="the result is the whole text")
mutant(GENERATE, "[prompt + new]", "[(prompt + new)[-1:]]", name="last-token-only",
       caught_by="test_the_model_reads_prompt_and_new_tokens_each_time",
       believes="the model remembers what it has read")
mutant(GENERATE, "torch.inference_mode()", "torch.enable_grad()", name="gradients-on",
       caught_by="test_the_model_reads_prompt_and_new_tokens_each_time",
       believes="nobody calls backward, so gradients cost nothing")
mutant(GENERATE, "top_p, generator)", "top_p)", caught_by="test_text_is_drawn_from_the_given_generator",
       name="generator-dropped", believes="sample finds its generator by itself")
mutant(GENERATE, "temperature, top_k, top_p, generator)", "temperature, 0, top_p, generator)", name="top-k-dropped",
       caught_by="test_settings_reach_the_sampler", believes="top_p makes top_k superfluous")
mutant(GENERATE, "(logits[:, -1], temperature,", "(logits[:, -1], min(temperature, 1e-4),", name="always-greedy",
       caught_by="test_settings_reach_the_sampler", believes="generating means taking the best token")
mutant(GENERATE, "if max_tokens < 1:", "if max_tokens < 0:", caught_by="test_generate_refuses", name="zero-tokens",
       believes="asking for nothing is no error")
