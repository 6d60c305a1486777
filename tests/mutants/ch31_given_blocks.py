"""Faults in the given code of chapter 31: the block manager, the batched backend, the list of backends."""

from tests.mutants import scaffold_mutant

BLOCKS = "engine/serve/blocks.py"

scaffold_mutant(
    BLOCKS,
    "        self.num_published[request] = min(self.num_published[request], whole)\n",
    "",
    caught_by="test_trim_withdraws_what_reaches_past_the_end",
    believes="the count of published blocks only ever grows",
    name="trim-leaves-the-published-count",
)
scaffold_mutant(
    BLOCKS,
    "min(self.num_published[request], whole)",
    "min(self.num_published[request], keep)",
    caught_by="test_what_trim_cut_is_published_again_with_its_new_content",
    believes="a block that is kept stays published",
    name="trim-counts-the-cut-block",
)
scaffold_mutant(
    BLOCKS,
    "        for block in table[whole:keep]:\n            self.forget_hash(block)\n",
    "",
    caught_by="test_trim_withdraws_what_reaches_past_the_end",
    believes="a block that is kept keeps its hash",
    name="trim-keeps-the-hash-of-the-cut-block",
)
scaffold_mutant(
    BLOCKS,
    "                self.forget_hash(block)\n                self._release(block)\n",
    "                self._release(block)\n",
    caught_by="test_trim_withdraws_what_reaches_past_the_end",
    believes="what a failed step published may stay findable",
    name="trim-keeps-hashes-of-dropped-blocks",
)
scaffold_mutant(
    BLOCKS,
    "self.ref_counts[table[whole]] > 1:",
    "self.ref_counts[table[whole]] > 2:",
    caught_by="test_trim_refuses_to_cut_a_shared_block",
    believes="two owners may share a block that one of them writes",
    name="trim-cuts-a-shared-block",
)
scaffold_mutant(
    BLOCKS,
    "        if self.num_free < self.num_blocks:\n            return False\n",
    "",
    caught_by="test_the_prefix_cache_is_reset_only_while_nobody_uses_a_block",
    believes="hashes can be forgotten at any time",
    name="reset-with-live-blocks",
)
scaffold_mutant(
    BLOCKS,
    "            self.stats.evictions += 1\n            self.forget_hash(block)\n",
    "            self.stats.evictions += 1\n",
    caught_by="test_free_blocks_are_taken_from_the_front_and_lose_their_names",
    believes="an old hash goes when a new one comes",
    name="eviction-keeps-the-hash",
)
scaffold_mutant(
    BLOCKS,
    "self.free_blocks.popitem(last=False)",
    "self.free_blocks.popitem()",
    caught_by="test_free_blocks_are_taken_from_the_front_and_lose_their_names",
    believes="the free blocks are a stack",
    name="takes-from-the-back",
)
scaffold_mutant(
    BLOCKS,
    "(i + 1) * size], request.cache_key))",
    "(i + 1) * size]))",
    caught_by="test_block_hashes_form_a_chain_with_the_cache_key",
    believes="tokens say it all",
    name="extra-keys-left-out",
)
scaffold_mutant(
    BLOCKS,
    "            parent = hashes[-1] if hashes else None\n",
    "            parent = hashes[0] if hashes else None\n",
    caught_by="test_block_hashes_form_a_chain_with_the_cache_key",
    believes="every block's parent is the first one",
    name="no-chain",
)
scaffold_mutant(
    "engine/serve/sdpa.py",
    "if self._meta is not meta:",
    "if self._meta is None:",
    caught_by="test_sdpa_serves_the_layers_of_many_steps",
    believes="all steps have the shape of the first",
    name="plans-of-another-step",
)
scaffold_mutant(
    "engine/serve/sdpa.py",
    "k_pos > q_pos[..., None] - window",
    "k_pos >= q_pos[..., None] - window",
    caught_by="test_sdpa_gives_what_the_reference_gives",
    believes="a window of w shows w keys before the query",
    name="window-one-too-wide",
)
scaffold_mutant(
    BLOCKS,
    "self.num_free / self.num_blocks",
    "len(self.cached) / self.num_blocks",
    caught_by="test_usage_and_hit_rate",
    believes="cached-free blocks are in use",
    name="usage-counts-cached",
)
scaffold_mutant(
    "engine/serve/flat.py",
    "self.model.lm_head(hidden_states).float()",
    "self.model.lm_head(hidden_states)",
    caught_by="test_logits_are_float32",
    believes="logits come in the model's dtype",
    name="logits-in-the-models-dtype",
)
scaffold_mutant(
    "engine/serve/attention.py",
    "known: {', '.join(sorted((*BACKENDS, 'auto')))}",
    "known: {', '.join(sorted(BACKENDS))}",
    caught_by="test_backends_are_known_by_name",
    believes="auto needs no mention",
    name="auto-not-listed",
)
