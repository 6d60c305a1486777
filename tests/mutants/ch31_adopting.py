"""Wrong answers of chapter 31: find_cached_prefix and allocate_slots."""

from tests.mutants import mutant

FIND = "BlockManager.find_cached_prefix"
ALLOCATE = "BlockManager.allocate_slots"

mutant(
    FIND,
    "(request.num_tokens - 1) // self.block_size",
    "request.num_tokens // self.block_size",
    caught_by="test_the_block_of_the_last_known_token_is_not_adopted",
    believes="a prompt that is cached whole needs no computing at all",
    name="adopts-the-last-block",
)
mutant(
    FIND,
    "(request.num_tokens - 1) // self.block_size",
    "(request.num_tokens - 1) // self.block_size - 1",
    caught_by="test_the_block_of_the_last_known_token_is_not_adopted",
    believes="the last full block is never to be adopted",
    name="one-block-too-few",
)
mutant(
    FIND,
    "(request.num_tokens - 1) // self.block_size",
    "(request.num_prompt_tokens - 1) // self.block_size",
    caught_by="test_a_resumed_request_finds_its_output_too",
    believes="only prompts are cached",
    name="prompt-only",
)
mutant(
    FIND,
    "                break\n",
    "                continue\n",
    caught_by="test_the_search_stops_at_the_first_miss",
    believes="whatever is found helps, wherever it stands",
    name="skips-a-miss",
)
mutant(
    FIND,
    "request.params.prompt_logprobs is not None",
    "request.params.prompt_logprobs",
    caught_by="test_a_prompt_that_wants_logprobs_adopts_nothing",
    believes="prompt_logprobs=0 asks for none",
    name="zero-logprobs",
)
mutant(
    FIND,
    "not self.enable_prefix_caching or ",
    "",
    caught_by="test_nothing_is_found_with_caching_off",
    believes="with caching off nothing is ever published, so there is nothing to ask",
    name="ignores-the-switch",
)
mutant(
    FIND,
    "            if digest not in self.cached:\n",
    "            if self.ref_counts[self.cached.get(digest, 0)] == 0 or digest not in self.cached:\n",
    caught_by="test_blocks_in_use_are_found_as_well_as_free_ones",
    believes="a free block holds nothing",
    name="in-use-only",
)
mutant(
    FIND,
    "            blocks.append(self.cached[digest])\n",
    "            blocks.append(self.cached[digest])\n            self.ref_counts[blocks[-1]] += 1\n",
    caught_by="test_prefixes_are_found_as_by_comparing_tokens",
    believes="what is found is taken at once",
    name="takes-references",
)
mutant(
    FIND,
    "            blocks.append(self.cached[digest])\n",
    "            blocks.append(self.cached[digest])\n            self.stats.tokens_adopted += self.block_size\n",
    caught_by="test_prefixes_are_found_as_by_comparing_tokens",
    believes="finding is a hit",
    name="counts-hits",
)
mutant(
    FIND,
    "self.block_hashes(request)[:",
    "[hash_block(None, request.token_ids[i * self.block_size :][: self.block_size], request.cache_key)\n"
    "            for i in range(request.num_tokens // self.block_size)][:",
    caught_by="test_looking_twice_hashes_each_block_once",
    believes="hashing is free, and a block is known by its own tokens",
    name="hashes-anew",
)
mutant(
    ALLOCATE,
    "num_new + sum(self.ref_counts[block] == 0 for block in cached_blocks) > self.num_free",
    "num_new > self.num_free",
    caught_by="test_three_cached_free_hits_and_two_new_blocks_need_five_free_ones",
    believes="a cached-free block is both a hit and a free block",
    name="double-count-of-cached-free",
)
mutant(
    ALLOCATE,
    "sum(self.ref_counts[block] == 0 for block in cached_blocks)",
    "len(cached_blocks)",
    caught_by="test_adopting_a_block_in_use_costs_nothing",
    believes="every adopted block uses up a free one",
    name="shared-blocks-cost",
)
mutant(
    ALLOCATE,
    "> self.num_free:",
    ">= self.num_free:",
    caught_by="test_the_last_free_block_is_handed_out",
    believes="one block must stay free",
    name="keeps-one-back",
)
mutant(
    ALLOCATE,
    "        num_owned = len(cached_blocks)",
    "        if admitted:\n            self.block_tables[request] = []\n        num_owned = len(cached_blocks)",
    caught_by="test_a_failed_admission_leaves_no_trace",
    believes="an empty entry does no harm",
    name="empty-entry-on-failure",
)
mutant(
    ALLOCATE,
    "        if num_new + sum",
    "        if admitted:\n"
    "            self.stats.tokens_known += request.num_tokens\n"
    "            self.stats.tokens_adopted += len(cached_blocks) * self.block_size\n"
    "        if num_new + sum",
    caught_by="test_a_failed_admission_leaves_no_trace",
    believes="a hit is a hit, whether or not the request gets in",
    name="counts-hits-of-failed-admissions",
)
mutant(
    ALLOCATE,
    "            return False\n",
    "            for _ in range(min(num_new, self.num_free)):\n"
    "                block = self.take_free_block()\n"
    "                self.ref_counts[block] = 1\n"
    "                self.block_tables.setdefault(request, []).append(block)\n"
    "            return False\n",
    caught_by="test_a_failed_growth_leaks_no_block",
    believes="take what there is; the rest comes later",
    name="keeps-part-of-a-failed-allocation",
)
mutant(
    ALLOCATE,
    "        for block in cached_blocks:\n            self.free_blocks.pop(block, None)\n"
    "        blocks = [*cached_blocks, *(self.take_free_block() for _ in range(num_new))]\n",
    "        blocks = [*cached_blocks, *(self.take_free_block() for _ in range(num_new))]\n"
    "        for block in cached_blocks:\n            self.free_blocks.pop(block, None)\n",
    caught_by="test_an_adopted_block_is_not_handed_out_as_a_new_one",
    believes="the order of adopting and taking does not matter",
    name="new-before-adopted",
)
mutant(
    ALLOCATE,
    "max(request.num_computed_tokens, len(cached_blocks) * self.block_size)",
    "request.num_computed_tokens + len(cached_blocks) * self.block_size",
    caught_by="test_a_swapped_request_gets_room_for_what_it_had_computed",
    believes="computed and adopted tokens add up",
    name="adds-computed-and-adopted",
)
mutant(
    ALLOCATE,
    "max(request.num_computed_tokens, len(cached_blocks) * self.block_size)",
    "len(cached_blocks) * self.block_size if admitted else request.num_computed_tokens",
    caught_by="test_a_swapped_request_gets_room_for_what_it_had_computed",
    believes="who is admitted has nothing but what it adopts",
    name="forgets-swapped-tokens",
)
mutant(
    ALLOCATE,
    "self.blocks_for(num_in_place + num_new_tokens)",
    "self.blocks_for(num_in_place + num_new_tokens + 1)",
    caught_by="test_a_block_is_added_when_the_last_one_is_full",
    believes="the next token needs a slot already now",
    name="one-token-ahead",
)
mutant(
    ALLOCATE,
    "self.blocks_for(num_in_place + num_new_tokens)",
    "(num_in_place + num_new_tokens) // self.block_size",
    caught_by="test_a_block_is_added_when_the_last_one_is_full",
    believes="a block that is not full is not needed yet",
    name="rounds-down",
)
mutant(
    ALLOCATE,
    "max(0, self.blocks_for(num_in_place + num_new_tokens) - num_owned)",
    "self.blocks_for(num_new_tokens)",
    caught_by="test_blocks_left_over_from_rejected_drafts_are_used_first",
    believes="new tokens need new blocks",
    name="ignores-owned-blocks",
)
mutant(
    ALLOCATE,
    "*(self.take_free_block() for _ in range(num_new))",
    "*(self.free_blocks.popitem(last=False)[0] for _ in range(num_new))",
    caught_by="test_a_block_that_is_handed_out_again_is_no_longer_found",
    believes="a block's old hash goes when a new one comes",
    name="keeps-old-hashes",
)
mutant(
    ALLOCATE,
    "        self.block_tables[request] += blocks\n",
    "        self.block_tables[request] = blocks + self.block_tables[request]\n",
    caught_by="test_allocations_in_random_pools",
    believes="a table is a set of blocks",
    name="new-blocks-in-front",
)
mutant(
    ALLOCATE,
    "            self.num_published[request] = len(cached_blocks)\n",
    "            self.num_published[request] = 0\n",
    caught_by="test_allocations_in_random_pools",
    believes="adopted blocks are yet to be published",
    name="adopted-not-published",
)
