"""Wrong answers of chapter 31: cache_full_blocks and free."""

from tests.mutants import mutant

PUBLISH = "BlockManager.cache_full_blocks"
FREE = "BlockManager.free"

mutant(
    PUBLISH,
    "min(num_tokens, request.num_tokens) // self.block_size",
    "num_tokens // self.block_size",
    caught_by="test_a_draft_is_never_published",
    believes="a token with K/V is a token to cache",
    name="publishes-drafts",
)
mutant(
    PUBLISH,
    "min(num_tokens, request.num_tokens) // self.block_size",
    "self.blocks_for(min(num_tokens, request.num_tokens))",
    caught_by="test_only_full_blocks_of_computed_tokens_are_published",
    believes="the last block can be published half full",
    name="partial-block",
)
mutant(
    PUBLISH,
    "            num_tokens = request.num_computed_tokens\n",
    "            num_tokens = request.num_tokens\n",
    caught_by="test_only_full_blocks_of_computed_tokens_are_published",
    believes="known tokens are computed tokens",
    name="known-instead-of-computed",
)
mutant(
    PUBLISH,
    "        if num_tokens is None:\n            num_tokens = request.num_computed_tokens\n",
    "        num_tokens = request.num_computed_tokens\n",
    caught_by="test_the_scheduler_may_count_the_tokens_of_the_coming_step",
    believes="what is not computed yet cannot be shared",
    name="ignores-num-tokens",
)
mutant(
    PUBLISH,
    "            if digest not in self.cached:\n"
    "                self.cached[digest] = block\n"
    "                self.hashes[block] = digest\n",
    "            self.cached[digest] = block\n            self.hashes[block] = digest\n",
    caught_by="test_the_first_writer_of_a_block_wins",
    believes="the newest copy is as good",
    name="last-writer-wins",
)
mutant(
    PUBLISH,
    "            if digest not in self.cached:\n"
    "                self.cached[digest] = block\n"
    "                self.hashes[block] = digest\n",
    "            self.cached.setdefault(digest, block)\n            self.hashes[block] = digest\n",
    caught_by="test_the_first_writer_of_a_block_wins",
    believes="both copies may bear the name",
    name="both-bear-the-hash",
)
mutant(
    PUBLISH,
    "range(self.num_published[request], num_full)",
    "range(num_full)",
    caught_by="test_a_block_goes_through_once",
    believes="it does no harm to publish everything again at every step",
    name="publishes-again",
)
mutant(
    PUBLISH,
    "max(num_full, self.num_published[request])",
    "num_full",
    caught_by="test_a_block_goes_through_once",
    believes="the count only ever grows by itself",
    name="published-count-goes-back",
)
mutant(
    PUBLISH,
    "        self.num_published[request] = max(num_full, self.num_published[request])",
    "        self.num_published[request] += 0",
    caught_by="test_a_draft_is_never_published",
    believes="somebody else counts",
    name="does-not-count",
)
mutant(
    PUBLISH,
    "        if not self.enable_prefix_caching:\n            return\n",
    "",
    caught_by="test_nothing_is_published_with_caching_off",
    believes="nobody looks with caching off",
    name="ignores-the-switch",
)
mutant(
    PUBLISH,
    "self.block_hashes(request)",
    "[hash_block(None, request.token_ids[i * self.block_size :][: self.block_size], request.cache_key)\n"
    "            for i in range(request.num_tokens // self.block_size)]",
    caught_by="test_chunks_over_a_hit_hash_each_block_once",
    believes="hashing is free, and a block is known by its own tokens",
    name="hashes-anew",
)
mutant(
    PUBLISH,
    "                self.hashes[block] = digest\n",
    "",
    caught_by="test_full_blocks_are_published_in_random_pools",
    believes="the dict from hash to block is enough",
    name="one-way-only",
)
mutant(
    FREE,
    "reversed(self.block_tables.pop(request, []))",
    "self.block_tables.pop(request, [])",
    caught_by="test_the_tail_is_evicted_before_the_head",
    believes="blocks are freed in the order of the table",
    name="head-first",
)
mutant(
    FREE,
    "                if self.hashes[block] is None:\n"
    "                    self.free_blocks.move_to_end(block, last=False)",
    "                pass",
    caught_by="test_blocks_without_a_hash_go_first",
    believes="all free blocks are alike",
    name="unhashed-at-the-back",
)
mutant(
    FREE,
    "if self.hashes[block] is None:",
    "if self.hashes[block] is not None:",
    caught_by="test_the_tail_is_evicted_before_the_head",
    believes="the front of the queue is where the good ones stand",
    name="hashed-at-the-front",
)
mutant(
    FREE,
    "            if self.ref_counts[block] == 0:\n",
    "            if self.ref_counts[block] >= 0:\n",
    caught_by="test_a_shared_block_loses_a_reference_only",
    believes="a request that leaves frees its blocks",
    name="frees-shared-blocks",
)
mutant(
    FREE,
    "            self.ref_counts[block] -= 1\n",
    "            self.ref_counts[block] = 0\n",
    caught_by="test_a_shared_block_loses_a_reference_only",
    believes="a block has one owner",
    name="zeroes-references",
)
mutant(
    FREE,
    "                self.free_blocks[block] = None\n",
    "                self.forget_hash(block)\n                self.free_blocks[block] = None\n",
    caught_by="test_freed_blocks_stay_findable",
    believes="a free block holds nothing",
    name="forgets-hashes",
)
mutant(
    FREE,
    "        self.num_published.pop(request, None)\n",
    "",
    caught_by="test_nothing_of_a_request_is_left",
    believes="a count does not matter once the request is gone",
    name="leaves-the-count",
)
mutant(
    FREE,
    "self.block_tables.pop(request, [])",
    "self.block_tables.get(request, [])",
    caught_by="test_nothing_of_a_request_is_left",
    believes="the table is dropped elsewhere",
    name="leaves-the-table",
)
mutant(
    FREE,
    "self.block_tables.pop(request, [])",
    "self.block_tables.pop(request)",
    caught_by="test_a_request_that_leaves_twice_or_never_came_changes_nothing",
    believes="only running requests are ever freed",
    name="needs-a-table",
)
mutant(
    FREE,
    "reversed(self.block_tables.pop(request, []))",
    "reversed(self.block_tables.pop(request, [])[: self.blocks_for(request.num_computed_tokens)])",
    caught_by="test_a_preempted_request_gives_all_its_blocks_back",
    believes="a request owns as many blocks as its computed tokens fill",
    name="leaks-blocks-not-computed-yet",
)
