from hashlib import blake2b
from operator import index


def hash_block(parent, tokens, extra=()):
    def check(value):
        if type(value) is tuple:
            for item in value:
                check(item)
        elif value is not None and type(value) not in (bool, int, float, str, bytes):
            raise TypeError(f"extra keys must be plain values, got {value!r}")

    check(extra)
    # repr of such values says both type and value, with delimiters that escape what they enclose.
    text = repr((parent, [index(token) for token in tokens], extra))
    return blake2b(text.encode(), digest_size=32).digest()


class BlockManager:
    def find_cached_prefix(self, request):
        if not self.enable_prefix_caching or request.params.prompt_logprobs is not None:
            return []
        blocks = []
        for digest in self.block_hashes(request)[: (request.num_tokens - 1) // self.block_size]:
            if digest not in self.cached:
                break
            blocks.append(self.cached[digest])
        return blocks

    def allocate_slots(self, request, num_new_tokens, cached_blocks=()):
        admitted = request not in self.block_tables
        num_owned = len(cached_blocks) if admitted else len(self.block_tables[request])
        num_in_place = max(request.num_computed_tokens, len(cached_blocks) * self.block_size)
        num_new = max(0, self.blocks_for(num_in_place + num_new_tokens) - num_owned)
        if not admitted and num_new == 0:
            return True  # as in most decodes
        if num_new + sum(self.ref_counts[block] == 0 for block in cached_blocks) > self.num_free:
            return False

        if admitted:
            self.block_tables[request] = []
            self.num_published[request] = len(cached_blocks)
            self.stats.tokens_known += request.num_tokens
            self.stats.tokens_adopted += len(cached_blocks) * self.block_size
        for block in cached_blocks:
            self.free_blocks.pop(block, None)
        blocks = [*cached_blocks, *(self.take_free_block() for _ in range(num_new))]
        for block in blocks:
            self.ref_counts[block] += 1
        self.block_tables[request] += blocks
        return True

    def cache_full_blocks(self, request, num_tokens=None):
        if not self.enable_prefix_caching:
            return
        if num_tokens is None:
            num_tokens = request.num_computed_tokens
        num_full = min(num_tokens, request.num_tokens) // self.block_size
        for i in range(self.num_published[request], num_full):
            block, digest = self.block_tables[request][i], self.block_hashes(request)[i]
            if digest not in self.cached:
                self.cached[digest] = block
                self.hashes[block] = digest
        self.num_published[request] = max(num_full, self.num_published[request])

    def free(self, request):
        self.num_published.pop(request, None)
        for block in reversed(self.block_tables.pop(request, [])):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free_blocks[block] = None
                if self.hashes[block] is None:
                    self.free_blocks.move_to_end(block, last=False)
