"""Back from preemption: what is adopted, what comes from the host, what is computed. Scheduler.schedule."""

from engine.serve.scheduler import Scheduler, SchedulerOutput
from tests.ch31.fake_pool import SCHEDULER, SWAP
from tests.ch31.harness import Harness, tokens
from tests.grading import expect, expect_equal, grades, rng

schedule = Scheduler.schedule
SWAP_IN = "the blocks from the adopted ones up to those of its computed tokens, and the same places of swapped_out"


def decoding(length, salt="decoding", max_tokens=12, **settings):
    """A harness with a request "a" that decodes: `length` known tokens, all but the newest computed."""
    harness = Harness(max_num_batched_tokens=256, **settings)
    request = harness.add("a", tokens(rng(salt), length - 1), max_tokens)
    harness.step()
    return harness, request


def preempt(harness, request):
    """Through the exercise `preempt`, and the copies made."""
    out = SchedulerOutput()
    harness.scheduler.preempt(request, out)
    harness.runner.swap(out)
    return out


@grades(schedule)
def test_a_swapped_request_goes_on_where_it_was():
    harness, a = decoding(11, host_blocks=10, enable_prefix_caching=False)
    preempt(harness, a)
    host = list(a.swapped_out)
    out = harness.scheduler.schedule()
    about = {"see": SWAP, "call": "schedule() that resumes a swapped-out request, 10 of 11 tokens computed"}
    expect_equal([(r.request_id, n) for r, n in out.scheduled], [("a", 1)], "(request, n) {i}", **about)
    expect_equal(a.num_computed_tokens, 10, "num_computed_tokens", **about)
    expect_equal(len(out.swap_in), 1, "number of entries in swap_in", **about)
    request, device, from_host = out.swap_in[0]
    expect(request is a, "the entry in swap_in is not for that request", see=SWAP)
    expect_equal(from_host, host, "host block {i} of swap_in", SWAP_IN, **about)
    expect_equal(device, harness.blocks.block_tables[a][:3], "device block {i} of swap_in", SWAP_IN, **about)
    harness.scheduler.undo(out)
    harness.drain()


@grades(schedule)
def test_only_what_was_not_adopted_comes_from_the_host():
    harness, a = decoding(19, host_blocks=10)
    preempt(harness, a)
    host, hit = list(a.swapped_out), harness.blocks.find_cached_prefix(a)
    harness.blocks.forget_hash(hit[2])  # of the full blocks 0-3 only 0 and 1 can be adopted now
    out = harness.scheduler.schedule()
    about = {"see": SWAP, "call": "schedule() that resumes a request with 5 blocks on the host, 2 to adopt"}
    expect_equal([(r.request_id, n) for r, n in out.scheduled], [("a", 1)], "(request, n) {i}", **about)
    expect_equal(
        a.num_computed_tokens, 18, "num_computed_tokens", "the larger of what it was and what it adopted", **about
    )
    expect_equal(len(out.swap_in), 1, "number of entries in swap_in", **about)
    _, device, from_host = out.swap_in[0]
    expect_equal(from_host, host[2:], "host block {i} of swap_in", SWAP_IN, **about)
    expect_equal(device, harness.blocks.block_tables[a][2:5], "device block {i} of swap_in", SWAP_IN, **about)
    expect_equal([(r.request_id, *rest) for r, *rest in out.admitted], [("a", 2, 18)], "admitted {i}", **about)
    harness.scheduler.undo(out)
    harness.drain()


@grades(schedule)
def test_nothing_left_to_restore_leaves_no_entry():
    """Nine tokens, two full blocks computed: both can be adopted again, so the host copies are not needed."""
    harness, a = decoding(9, host_blocks=10)
    preempt(harness, a)
    out = harness.scheduler.schedule()
    about = {"see": SWAP, "call": "schedule() that resumes a request whose 2 computed blocks are all still cached"}
    expect_equal(len(out.swap_in), 0, "number of entries in swap_in", **about)
    expect_equal([(r.request_id, n) for r, n in out.scheduled], [("a", 1)], "(request, n) {i}", **about)
    harness.scheduler.undo(out)
    harness.drain()


@grades(schedule)
def test_a_swapped_request_may_adopt_more_than_it_had_computed():
    """It was swapped out with 6 of its 14 prompt tokens computed; since then somebody computed all of them."""
    settings = {"max_num_batched_tokens": 6, "max_num_seqs": 1, "host_blocks": 10, "policy": "priority"}
    harness, prompt = Harness(**settings), tokens(rng("more"), 14)
    a = harness.add("a", prompt, priority=1)
    harness.step()
    preempt(harness, a)
    harness.add("b", prompt, max_tokens=1, priority=0)
    for _ in range(3):  # "b" adopts one block and computes 10 tokens, so it ends in the second step
        if "b" in harness.scheduler.requests:
            harness.step()
    out = harness.scheduler.schedule()
    about = {"see": SWAP, "call": "schedule() that resumes a request with 6 computed tokens and 12 that it can adopt"}
    expect_equal(a.num_computed_tokens, 12, "num_computed_tokens", "the larger of the two", **about)
    expect_equal(len(out.swap_in), 0, "number of entries in swap_in", **about)
    expect_equal([(r.request_id, n) for r, n in out.scheduled], [("a", 2)], "(request, n) {i}", **about)
    harness.scheduler.undo(out)
    harness.drain()


@grades(schedule)
def test_a_resumed_request_that_finds_nothing_starts_over():
    harness, a = decoding(11)
    preempt(harness, a)
    harness.blocks.reset_prefix_cache()
    out = harness.scheduler.schedule()
    about = {"see": SWAP, "call": "schedule() that resumes a request whose blocks cannot be found any more"}
    expect_equal([(r.request_id, n) for r, n in out.scheduled], [("a", 11)], "(request, n) {i}", **about)
    harness.scheduler.undo(out)
    harness.drain()


@grades(schedule)
def test_num_cached_tokens_stays_that_of_the_first_admission():
    harness, a = decoding(12)
    preempt(harness, a)
    harness.step()
    hint = "a resumed request adopts its own blocks again, which is no hit of its prompt"
    expect_equal(a.num_cached_tokens, 0, "num_cached_tokens of a request that was resumed", hint, SCHEDULER)
    stats = harness.blocks.stats
    expect(stats.tokens_adopted == 8, f"{stats.tokens_adopted} tokens adopted; two blocks of 4 could be", see=SCHEDULER)
    harness.drain()
