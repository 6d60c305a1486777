"""Wrong answers of chapter 16."""

from tests.mutants import mutant

RETURN = "return self.k_cache[layer, :, :, :end], self.v_cache[layer, :, :, :end], k_pos, None"

mutant(
    "KVCache.append", "self.k_cache[layer, :, :, start:end] = k", "self.k_cache[layer, :, :, :T] = k",
    caught_by="test_append_returns_old_and_new", believes="new keys are written at the front", name="overwrite",
)  # fmt: skip
mutant(
    "KVCache.append", RETURN, "return k, v, positions[0], None",
    caught_by="test_append_returns_old_and_new", believes="attention needs only the new keys", name="only-new",
)  # fmt: skip
mutant(
    "KVCache.append", RETURN, RETURN.replace(":end]", ":]"),
    caught_by="test_append_returns_old_and_new", believes="the mask will hide the unused end", name="whole-room",
)  # fmt: skip
mutant(
    "KVCache.append", "k_pos = torch.arange(end,", "k_pos = torch.arange(start, end,",
    caught_by="test_append_returns_old_and_new", believes="k_pos are the new positions", name="new-k-pos",
)  # fmt: skip
mutant(
    "KVCache.append", "self.v_cache[layer, :, :, start:end] = v", "self.v_cache[layer, :, :, start:end] = k",
    caught_by="test_layers_are_apart", believes="a slip of the hand: keys stored twice", name="keys-as-values",
)  # fmt: skip
mutant(
    "KVCache.append", "self.lengths[layer] = end", "self.lengths = [end] * len(self.lengths)",
    caught_by="test_layers_are_apart", believes="one append moves the whole cache on", name="all-layers",
)  # fmt: skip
mutant(
    "KVCache.append", RETURN, RETURN.replace(":end],", ":end].clone(),"),
    caught_by="test_the_result_is_a_view_and_the_cache_a_copy", believes="a copy is safer", name="copies",
)  # fmt: skip
mutant(
    "KVCache.append", "if end > max_len:", "if end >= max_len:",
    caught_by="test_a_full_cache_says_so", believes="the last position stays free", name="one-too-few",
)  # fmt: skip
mutant(
    "KVCache.append", "    end = start + T\n", "    end = start + T\n        self.lengths[layer] = end\n",
    caught_by="test_a_full_cache_says_so", believes="count first, check later", name="counted-before-check",
)  # fmt: skip
mutant(
    "KVCache.append", "if not torch.equal(positions.to(expected.dtype), expected):", "if positions[0, 0] != start:",
    caught_by="test_positions_must_continue", believes="the first position of the first row speaks for all",
    name="first-only",
)  # fmt: skip
mutant(
    "KVCache.append", "start = self.lengths[layer]", "start = int(positions[0, 0])",
    caught_by="test_positions_must_continue", believes="write wherever the caller says", name="anywhere",
)  # fmt: skip
mutant(
    "KVCache.append", "if tuple(x.shape) != (B, Hkv, T, D):", "if x.shape[2] != T:",
    caught_by="test_shapes_are_not_stretched", believes="torch refuses shapes that do not fit", name="broadcast",
)  # fmt: skip

mutant(
    "kv_cache.generate", "feed = [token]", "feed = prompt + new",
    caught_by="test_same_tokens_as_uncached", believes="the model always sees the whole text", name="whole-text-again",
)  # fmt: skip
mutant(
    "kv_cache.generate", "feed = [token]", "feed = feed[-1:]",
    caught_by="test_same_tokens_as_uncached", believes="the last token of the last input comes next",
    name="old-token-again",
)  # fmt: skip
mutant(
    "kv_cache.generate", "logits[:, -1]", "logits[:, 0]",
    caught_by="test_same_tokens_as_uncached", believes="there is one row of logits, since one token was fed",
    name="first-row",
)  # fmt: skip
mutant(
    "kv_cache.generate", "device), cache)", "device), KVCache.for_model(model, 1, len(prompt) + max_tokens))",
    caught_by="test_same_tokens_as_uncached", believes="each call brings its own cache", name="fresh-cache",
)  # fmt: skip
mutant(
    "kv_cache.generate", "device=cache.k_cache.device), cache)",
    "device=cache.k_cache.device), cache, torch.arange(len(feed))[None])",
    caught_by="test_same_tokens_as_uncached", believes="positions count from the start of this input",
    name="positions-from-zero",
)  # fmt: skip
mutant(
    "kv_cache.generate", "max_len=len(prompt) + max_tokens", "max_len=model.cfg.max_position_embeddings",
    caught_by="test_same_tokens_as_uncached", believes="a cache has room for the longest text", name="room-for-all",
)  # fmt: skip
mutant(
    "kv_cache.generate", "new, feed = [], prompt\n",
    "new, feed = [], prompt\n    sample(torch.zeros(1, 9), 1.0, generator=generator)\n",
    caught_by="test_same_draws_as_uncached", believes="one draw to warm up does no harm", name="extra-draw",
)  # fmt: skip
mutant(
    "kv_cache.generate", "            feed = [token]\n    return new",
    "            feed = [token]\n        model(torch.tensor([feed]), cache)\n    return new",
    caught_by="test_one_call_a_token", believes="the last token is fed, too", name="one-call-more",
)  # fmt: skip
mutant(
    "kv_cache.generate", "            if token in stops:\n                break\n            feed = [token]",
    "            feed = [token]\n            if token in stops:\n                return new[:-1]",
    caught_by="test_stops_behind_the_end_token", believes="the end token is no part of the text", name="end-dropped",
)  # fmt: skip
mutant(
    "kv_cache.generate", "(eos_token_id,) if isinstance(eos_token_id, int) else tuple(eos_token_id)",
    "(eos_token_id,) if isinstance(eos_token_id, int) else eos_token_id[:1]",
    caught_by="test_stops_behind_the_end_token", believes="there is one end token", name="first-end-only",
)  # fmt: skip
mutant(
    "kv_cache.generate", "if token in stops:", "if set(stops) & set(prompt + new):",
    caught_by="test_an_end_token_in_the_prompt_ends_nothing", believes="an end token anywhere ends the text",
    name="end-in-prompt",
)  # fmt: skip
mutant(
    "kv_cache.generate", "if max_tokens < 1:", "if max_tokens < 0:",
    caught_by="test_nothing_to_do_is_an_error", believes="no tokens is a fair wish", name="zero-tokens",
)  # fmt: skip
