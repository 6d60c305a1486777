"""Right answers of chapter 31, built differently: hash_block and the block manager."""

from tests.alternatives import alternative

alternative(
    "hash_block",
    name="length-prefixed-bytes",
    source='''
        def hash_block(parent, tokens, extra=()):
            def field(tag, data):
                return tag + len(data).to_bytes(8, "big") + data

            def encode(value):
                if value is None:
                    return field(b"N", b"")
                if isinstance(value, bool):
                    return field(b"?", bytes([value]))
                if isinstance(value, int):
                    return field(b"i", value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))
                if isinstance(value, float):
                    return field(b"f", value.hex().encode())
                if isinstance(value, str):
                    return field(b"s", value.encode("utf-8", "surrogatepass"))
                if isinstance(value, bytes):
                    return field(b"b", value)
                if isinstance(value, tuple):
                    return field(b"(", b"".join(map(encode, value)))
                raise TypeError(f"cannot be part of a block hash: {value!r}")

            state = blake2b(encode(parent), digest_size=16)
            state.update(field(b"t", b"".join(token.to_bytes(8, "little") for token in tokens)))
            state.update(encode(extra))
            return state.digest()
    ''',
)
alternative(
    "hash_block",
    name="hash-of-hashes",
    source='''
        def hash_block(parent, tokens, extra=()):
            def digest(kind, data):
                return blake2b(data, digest_size=32, person=kind).digest()

            def value(item):
                if type(item) is tuple:
                    return digest(b"tuple", b"".join([value(inner) for inner in item]))
                return digest(type(item).__name__.encode(), repr(item).encode())

            words = digest(b"tokens", " ".join([str(token) for token in tokens]).encode())
            return digest(b"block", value(parent) + words + value(extra))
    ''',
)
alternative(
    "BlockManager.find_cached_prefix",
    name="takewhile",
    source='''
        def find_cached_prefix(self, request):
            from itertools import takewhile

            if request.params.prompt_logprobs is None and self.enable_prefix_caching:
                found = list(takewhile(lambda name: name in self.cached, self.block_hashes(request)))
                if len(found) * self.block_size == request.num_tokens:
                    found.pop()
                return [self.cached[name] for name in found]
            return []
    ''',
)
alternative(
    "BlockManager.find_cached_prefix",
    name="recursion",
    source='''
        def find_cached_prefix(self, request):
            def from_block(i):
                if (i + 1) * self.block_size >= request.num_tokens:
                    return []
                block = self.cached.get(names[i])
                return [] if block is None else [block, *from_block(i + 1)]

            names = self.block_hashes(request)
            off = not self.enable_prefix_caching or request.params.prompt_logprobs is not None
            return [] if off else from_block(0)
    ''',
)
alternative(
    "BlockManager.allocate_slots",
    name="new-blocks-in-another-order",
    source='''
        def allocate_slots(self, request, num_new_tokens, cached_blocks=()):
            size, table = self.block_size, list(self.block_tables.get(request, cached_blocks))
            tokens = request.num_computed_tokens
            if request not in self.block_tables:
                tokens = max(tokens, size * len(cached_blocks))
            missing = -(-(tokens + num_new_tokens) // size) - len(table)
            waking = [block for block in cached_blocks if block in self.free_blocks]
            if missing > 0 and missing + len(waking) > len(self.free_blocks):
                return False
            for block in waking:
                del self.free_blocks[block]
            for block in cached_blocks:
                self.ref_counts[block] += 1
            fresh = []
            while len(fresh) < missing:
                fresh.append(self.take_free_block())
                self.ref_counts[fresh[-1]] = 1
            if request not in self.block_tables:
                self.num_published[request] = len(cached_blocks)
                self.stats.tokens_known += request.num_tokens
                self.stats.tokens_adopted += size * len(cached_blocks)
            self.block_tables[request] = table + fresh[::-1]
            return True
    ''',
)
alternative(
    "BlockManager.cache_full_blocks",
    name="one-block-at-a-time",
    source='''
        def cache_full_blocks(self, request, num_tokens=None):
            limit = request.num_computed_tokens if num_tokens is None else num_tokens
            limit = min(limit, len(request.token_ids))
            while self.enable_prefix_caching:
                i = self.num_published[request]
                if (i + 1) * self.block_size > limit:
                    return
                name, block = self.block_hashes(request)[i], self.block_tables[request][i]
                if self.cached.setdefault(name, block) == block:
                    self.hashes[block] = name
                self.num_published[request] = i + 1
    ''',
)
alternative(
    "BlockManager.free",
    name="two-lists",
    source='''
        def free(self, request):
            if request not in self.block_tables:
                return
            empty, hashed = [], []
            for block in self.block_tables.pop(request):
                self.ref_counts[block] -= 1
                if not self.ref_counts[block]:
                    (empty if self.hashes[block] is None else hashed).append(block)
            for block in empty:
                self.free_blocks[block] = None
                self.free_blocks.move_to_end(block, last=False)
            while hashed:
                self.free_blocks[hashed.pop()] = None
            del self.num_published[request]
    ''',
)
alternative(
    "BlockManager.free",
    name="a-new-queue",
    source='''
        def free(self, request):
            from collections import Counter

            self.num_published.pop(request, 0)
            table = self.block_tables.pop(request, ())
            for block, count in Counter(table).items():
                self.ref_counts[block] -= count
            gone = [block for block in table if self.ref_counts[block] == 0]
            empty = [block for block in gone if self.hashes[block] is None]
            hashed = [block for block in gone[::-1] if self.hashes[block] is not None]
            self.free_blocks = OrderedDict.fromkeys([*empty, *self.free_blocks, *hashed])
    ''',
)
