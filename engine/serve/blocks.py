"""The block pool: who owns which block, which blocks can be found by content, which go first when space is needed."""

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b  # noqa: F401  (for hash_block)
from operator import index  # noqa: F401  (for hash_block)

from engine.exercises import exercise, fill
from engine.serve.request import Request


@exercise(31, "Hash chains")
def hash_block(parent, tokens, extra=()) -> bytes:
    """Name of a full block: a hash of everything its K/V depends on.  (Your engine: Chapter 31)

    parent: hash of the block before it (bytes), None for the first.  tokens: the token ids in the block.
    extra: whatever else K/V depends on (tenant, adapter, ...): None, bool, int, float, str, bytes, or tuples of them.
    Returns at least 16 bytes of BLAKE2b: the same value in every process and on every run, and different for any two
    different triples. So the encoding that is hashed must be injective: no two triples may share one. In extra, `1`,
    `1.0`, `True`, `"1"` and `b"1"` are five different keys, and `("ab",)` is not `("a", "b")`; an empty parent is not
    None.
    A list of tokens and a tuple of the same tokens are the same tokens.
    Source: block hashes of vLLM; Merkle's hash chains.
    """
    raise NotImplementedError


class BrokenInvariant(RuntimeError):
    """Raised by BlockManager.check."""


@dataclass
class PrefixStats:
    """Counted once for each admission that succeeded."""

    tokens_known: int = 0
    tokens_adopted: int = 0
    evictions: int = 0  # hashed blocks handed out again


class BlockManager:
    """Hands out the num_blocks blocks of the pool; a block is in use, cached-free or empty-free.

    State that `__init__` sets up (b is a block id, 0 .. num_blocks - 1):
    ref_counts[b]: how many requests own b.  hashes[b]: the hash b is published under, None if it is not.
    cached: dict hash -> b, the block that bears it.
    free_blocks: OrderedDict of the ids with ref_count 0, in the order in which they are handed out again:
    front first. A cached-free block (free, with a hash) stays findable until it is handed out.
    block_tables: dict Request -> list of its blocks, in logical order.
    num_published: dict Request -> how many of its leading blocks have been through cache_full_blocks (or were adopted).
    stats: PrefixStats.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True):
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks and block_size must be at least 1, got {num_blocks} and {block_size}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.ref_counts = [0] * num_blocks
        self.hashes: list[bytes | None] = [None] * num_blocks
        self.cached: dict[bytes, int] = {}
        self.free_blocks = OrderedDict.fromkeys(range(num_blocks))
        self.block_tables: dict[Request, list[int]] = {}
        self.num_published: dict[Request, int] = {}
        self.stats = PrefixStats()

    # -- for the exercises to use

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def block_hashes(self, request) -> list[bytes]:
        """Hashes of all full blocks of the request's known tokens; each is computed once and kept in the request."""
        hashes, size = request.block_hashes, self.block_size
        for i in range(len(hashes), (request.num_tokens - request.num_placeholders) // size):
            parent = hashes[-1] if hashes else None
            hashes.append(hash_block(parent, request.token_ids[i * size : (i + 1) * size], request.cache_key))
        return hashes

    def take_free_block(self) -> int:
        """The block at the front of free_blocks, its hash (if any) forgotten; its ref_count is still 0."""
        block, _ = self.free_blocks.popitem(last=False)
        if self.hashes[block] is not None:
            self.stats.evictions += 1
            self.forget_hash(block)
        return block

    def add_block(self, request) -> None:
        """One more block for a request that has a table, when at least one is free: allocate_slots at its simplest."""
        block = self.take_free_block()
        self.ref_counts[block] += 1
        self.block_tables[request].append(block)

    def forget_hash(self, block: int) -> None:
        """Make a block unfindable."""
        if self.hashes[block] is not None:
            del self.cached[self.hashes[block]]
            self.hashes[block] = None

    # -- exercises

    @exercise(31, "The three states of a block")
    def find_cached_prefix(self, request) -> list[int]:
        """The blocks that already hold the beginning of the request's tokens.  (Your engine: Chapter 31)

        Walks `block_hashes(request)` from the first block on and stops at the first hash that `cached` lacks.
        Never includes the block that holds the last known token (token num_tokens - 1): that token must be computed,
        its logits are needed.  Empty with prefix caching off, or if the request wants prompt_logprobs (each
        prompt row has to be computed then).
        Looks only: no reference, no queue and no statistic changes.
        Returns block ids in logical order.  Source: automatic prefix caching of vLLM.
        """
        raise NotImplementedError

    @exercise(31, "The three states of a block")
    def allocate_slots(self, request, num_new_tokens, cached_blocks=()) -> bool:
        """Make room for num_new_tokens more tokens of a request, all or nothing.  (Your engine: Chapter 31)

        A request without an entry in block_tables is being admitted: it adopts cached_blocks (as find_cached_prefix
        gave them) as the head of its new table. The tokens already in place are then the larger of num_computed_tokens
        and len(cached_blocks) * block_size. A request that has a table (cached_blocks is then empty) has
        num_computed_tokens in place. New blocks come from `take_free_block` and follow at the end of the table, as many
        as the total number of tokens needs (`blocks_for`) and the table does not have yet. Adopting a block that is
        free (ref_count 0) takes it out of free_blocks, and so uses up a free block: count it together with the new ones
        before anything is touched. Adopting one that is in use costs nothing.
        Returns False if there are not enough free blocks; then nothing at all has changed, no entry is left behind.
        On True every block of the table has one more reference than before for being adopted or new, num_published
        starts at the number of adopted blocks, and, for an admission only, stats.tokens_known grows by the
        request's num_tokens and stats.tokens_adopted by the adopted tokens.
        """
        raise NotImplementedError

    @exercise(31, "The three states of a block")
    def cache_full_blocks(self, request, num_tokens=None) -> None:
        """Publish the request's full blocks so that others can adopt them.  (Your engine: Chapter 31)

        num_tokens: how many of its tokens have K/V in place, by default num_computed_tokens; the scheduler also counts
        those that the coming step writes. Only known tokens count: never publish a block that holds a draft.
        Each full block not yet been through here (see num_published) gets its hash, `block_hashes(request)[i]`, in
        hashes and cached. First writer wins: if cached already has that hash, this block stays without one.
        Does nothing with prefix caching off.
        """
        raise NotImplementedError

    @exercise(31, "The three states of a block")
    def free(self, request) -> None:
        """Give up all blocks of a request.  (Your engine: Chapter 31)

        A block still owned by another request only loses a reference. One that loses its last reference becomes free:
        at the front of free_blocks if it bears no hash (it can never be hit), else at the back, and of the hashed
        blocks the tail of the sequence before its head: a head is useful to more prompts, so it should go last.
        Hashes stay: freed blocks are findable until they are handed out again. The entries of the request in
        block_tables and num_published go. A request without a table: nothing happens.
        """
        raise NotImplementedError

    # -- the rest

    def trim(self, request, num_tokens: int) -> None:
        """Shrink a request to what num_tokens tokens need; no block that reaches past them keeps this request's hash.

        ValueError if the block that would be cut is owned by another request too: writing on would corrupt it.
        """
        table = self.block_tables[request]
        keep, whole = self.blocks_for(num_tokens), num_tokens // self.block_size
        if keep > whole and keep <= len(table) and self.ref_counts[table[whole]] > 1:
            raise ValueError(
                f"request {request.request_id!r}: block {whole} is shared and cannot be cut at {num_tokens} tokens"
            )
        for block in table[whole:keep]:
            self.forget_hash(block)
        while len(table) > keep:
            block = table.pop()
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.forget_hash(block)
                self._release(block)
        self.num_published[request] = min(self.num_published[request], whole)

    def _release(self, block: int) -> None:
        self.free_blocks[block] = None
        self.free_blocks.move_to_end(block, last=False)

    def reset_prefix_cache(self) -> bool:
        """Forget every hash, after the weights changed, say. False and unchanged while any block is in use.

        Copies on the host are not known here: EngineCore.reset_prefix_cache is the one to call.
        """
        if self.num_free < self.num_blocks:
            return False
        self.cached.clear()
        self.hashes = [None] * self.num_blocks
        return True

    def start_over(self) -> None:
        """Every block is free and empty, whatever state they were in; the statistics stay."""
        stats = self.stats
        self.__init__(self.num_blocks, self.block_size, self.enable_prefix_caching)
        self.stats = stats

    @property
    def num_free(self) -> int:
        return len(self.free_blocks)

    @property
    def usage(self) -> float:
        """Share of the pool that is in use."""
        return 1 - self.num_free / self.num_blocks

    @property
    def hit_rate(self) -> float:
        """Tokens adopted / tokens known, over all admissions."""
        return self.stats.tokens_adopted / self.stats.tokens_known if self.stats.tokens_known else 0.0

    def check(self) -> None:
        """Raise BrokenInvariant with the first invariant that does not hold."""
        owners = [0] * self.num_blocks
        for request, table in self.block_tables.items():
            if len(set(table)) < len(table):
                raise BrokenInvariant(f"request {request.request_id!r} has a block twice in its table")
            for block in table:
                owners[block] += 1
        for block, count in enumerate(self.ref_counts):
            if count != owners[block]:
                raise BrokenInvariant(f"block {block} has {count} references and {owners[block]} owners")
            if (count == 0) != (block in self.free_blocks):
                state = "free" if block in self.free_blocks else "not free"
                raise BrokenInvariant(f"block {block} is {state} with {count} owners")
        if len(self.free_blocks) + sum(count > 0 for count in self.ref_counts) != self.num_blocks:
            raise BrokenInvariant(f"{len(self.free_blocks)} free and the used blocks are not all {self.num_blocks}")
        for digest, block in self.cached.items():
            if self.hashes[block] != digest:
                raise BrokenInvariant(f"hash {digest.hex()[:12]} maps to block {block}, which does not bear it")
        for block, digest in enumerate(self.hashes):
            if digest is not None and self.cached.get(digest) != block:
                raise BrokenInvariant(f"block {block} bears hash {digest.hex()[:12]}, which does not map to it")
        if self.block_tables.keys() != self.num_published.keys():
            raise BrokenInvariant("block_tables and num_published have different requests")
        for request, count in self.num_published.items():
            if count > len(self.block_tables[request]):
                raise BrokenInvariant(f"request {request.request_id!r}: {count} blocks published, fewer owned")


fill(__name__)
