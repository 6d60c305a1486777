"""What a step plans: budget, order, admission, prefix hits. Scheduler.schedule over the fake pool."""

import pytest

from engine.serve.request import Status
from engine.serve.scheduler import Scheduler
from tests.ch31.fake_pool import SCHEDULER, SWAP
from tests.ch31.harness import Harness, check_blocks, tokens
from tests.grading import expect, expect_equal, grades, rng

schedule = Scheduler.schedule
CALL = "schedule()"


def names(plan):
    """Request ids of (request, …) tuples or of plain requests."""
    return [(entry[0] if isinstance(entry, tuple) else entry).request_id for entry in plan]


def counts(plan):
    return [(request.request_id, n) for request, n in plan]


def share_out(prompts, outputs, budget, cap, slots, chunked):
    """Plans for an ample pool without sharing, from counts alone."""
    waiting, running, plans = list(range(len(prompts))), [], []
    left, tokens_left = list(prompts), list(outputs)
    while waiting or running:
        room, plan = budget, []
        for i in running:
            n = min(left[i], cap or budget, room)
            plan += [(i, n)] if n else []
            room -= n
        while waiting and room and len(running) < slots:
            n = min(left[waiting[0]], cap or budget)
            if n > room and not chunked:
                break
            plan.append((waiting[0], min(n, room)))
            room -= min(n, room)
            running.append(waiting.pop(0))
        for i, n in plan:
            left[i] -= n
            if left[i] == 0:
                left[i], tokens_left[i] = 1, tokens_left[i] - 1
        running = [i for i in running if tokens_left[i]]
        plans.append(plan)
    return plans


@grades(schedule)
@pytest.mark.parametrize(
    "budget, cap, slots, chunked",
    [(16, 0, 8, True), (5, 0, 8, True), (1, 0, 3, True), (16, 3, 8, True), (7, 5, 2, True), (40, 0, 8, False)],
)
def test_every_step_deals_out_its_budget_in_order(budget, cap, slots, chunked):
    random = rng(f"share {budget} {cap} {slots}")
    prompts, outputs = [[random.randint(1, 20) for _ in range(7)] for _ in range(2)]
    harness = Harness(
        num_blocks=200, max_num_batched_tokens=budget, long_prefill_token_threshold=cap, max_num_seqs=slots,
        enable_chunked_prefill=chunked, enable_prefix_caching=False,
    )  # fmt: skip
    for i, (length, wanted) in enumerate(zip(prompts, outputs, strict=True)):
        harness.add(str(i), tokens(random, length), wanted)
    config = f"budget {budget}, cap {cap}, {slots} sequences, chunked prefill {'on' if chunked else 'off'}"
    for number, expected in enumerate(share_out(prompts, outputs, budget, cap, slots, chunked)):
        plan = [(int(name), n) for name, n in harness.step()]
        what = f"step {number} ({config}), (request, n) {{i}}"
        expect_equal(plan, expected, what, "running ones first, then the queue, each cut to what is left", SCHEDULER)
    harness.check_idle()


@grades(schedule)
def test_the_cap_of_long_prefills_leaves_room_for_others():
    harness = Harness(max_num_batched_tokens=12, long_prefill_token_threshold=4)
    harness.add("long", tokens(rng("long"), 30))
    harness.add("short", tokens(rng("short"), 3))
    for number, expected in enumerate([[("long", 4), ("short", 3)], [("long", 4), ("short", 1)]]):
        what = f"step {number}, budget 12, long_prefill_token_threshold 4: (request, n) {{i}}"
        expect_equal(harness.step(), expected, what, "it caps running requests and admitted ones", SCHEDULER)


@grades(schedule)
def test_a_plan_moves_no_count_beyond_adoption():
    harness, random = Harness(max_num_batched_tokens=40), rng("moves")
    shared = tokens(random, 8)
    harness.add("a", [*shared, 1, 2], max_tokens=9)
    harness.step()
    a, b = harness.scheduler.requests["a"], harness.add("b", [*shared, 3, 4, 5])
    before = a.num_computed_tokens
    out = harness.scheduler.schedule()
    expect_equal(counts(out.scheduled), [("a", 1), ("b", 3)], "(request, n) {i}", see=SCHEDULER, call=CALL)
    about = {"hint": "the tokens count once the step has succeeded", "see": SCHEDULER, "call": CALL}
    expect_equal(a.num_computed_tokens, before, "num_computed_tokens of a running request", **about)
    expect_equal(b.num_computed_tokens, 8, "num_computed_tokens of a request that adopted two blocks of 4", **about)


@grades(schedule)
def test_a_cached_prefix_is_not_computed_again():
    harness, random = Harness(max_num_batched_tokens=64), rng("hit")
    prompt = tokens(random, 14)
    harness.add("first", prompt)
    harness.drain()
    second = harness.add("second", prompt)
    about = {"see": SCHEDULER, "call": "second request with the 14 tokens of the first, blocks of 4"}
    expect_equal(harness.step(), [("second", 2)], "(request, n) {i}", "three full blocks can be adopted", **about)
    expect_equal(second.num_cached_tokens, 12, "num_cached_tokens", **about)
    harness.drain()


@grades(schedule)
def test_requests_that_arrive_together_share_their_prefix():
    harness, prompt = Harness(max_num_batched_tokens=64), tokens(rng("together"), 13)
    harness.add("a", prompt)
    harness.add("b", prompt)
    hint = "publish the full blocks of a request when it is planned, not when the step is over"
    what = "(request, n) {i} of a step that admits two equal prompts of 13 tokens, blocks of 4"
    expect_equal(harness.step(), [("a", 13), ("b", 1)], what, hint, SCHEDULER)
    harness.drain()


@grades(schedule)
def test_a_chunk_publishes_its_own_blocks_and_no_more():
    harness = Harness(max_num_batched_tokens=12, long_prefill_token_threshold=6)
    prompt = tokens(rng("own"), 21)
    for name in ("a", "b"):
        harness.add(name, prompt)
    out = harness.scheduler.schedule()
    adopted = harness.scheduler.requests["b"].num_computed_tokens
    hint = "those of num_computed_tokens + n, which this step writes"
    what = "tokens that a second request adopts from a prompt of which 6 tokens are planned"
    expect_equal(adopted, 4, what, hint, SCHEDULER, CALL)
    harness.scheduler.undo(out)
    harness.drain()


@grades(schedule)
def test_an_admission_is_recorded_so_that_it_can_be_undone():
    harness, prompt = Harness(max_num_batched_tokens=64), tokens(rng("recorded"), 13)
    harness.add("a", prompt)
    harness.add("b", prompt)
    out = harness.scheduler.schedule()
    got = [(request.request_id, *rest) for request, *rest in out.admitted]
    what = "admitted[{r}]: (request, adopted blocks, num_computed_tokens before)"
    expect_equal(got, [("a", 0, 0), ("b", 3, 0)], what, see=SCHEDULER, call=CALL)
    harness.scheduler.undo(out)
    harness.drain()


@grades(schedule)
def test_drafts_are_scheduled_and_take_budget():
    harness = Harness(max_num_batched_tokens=6)
    for name in ("a", "b", "c"):
        harness.add(name, [1, 2], max_tokens=9)
    harness.step()
    requests = harness.scheduler.requests
    requests["a"].spec_token_ids = [5, 6, 7]
    requests["b"].spec_token_ids = [5, 6, 7]
    out = harness.scheduler.schedule()
    what = "(request, n) {i}, three decodes, two with 3 drafts, budget 6"
    expect_equal(
        counts(out.scheduled), [("a", 4), ("b", 2)], what, "a draft is a token like any other", SCHEDULER, CALL
    )


@grades(schedule)
def test_no_more_requests_run_than_there_are_slots():
    harness = Harness(max_num_seqs=2)
    for name in ("a", "b", "c"):
        harness.add(name, tokens(rng(name), 3), max_tokens=2 if name == "a" else 4)
    plans = [[name for name, _ in harness.step()] for _ in range(3)]
    hint = "a slot is free as soon as a request ended"
    what = "requests of step {i}, max_num_seqs 2, the first ends after two steps"
    expect_equal(plans, [["a", "b"], ["a", "b"], ["b", "c"]], what, hint, SCHEDULER)


def blocked(**settings):
    """6 of 8 blocks are taken; "big" needs 5 and waits in front of "small", which needs 1."""
    harness = Harness(num_blocks=8, max_num_batched_tokens=64, **settings)
    harness.add("old", tokens(rng("old"), 22), max_tokens=2, arrival_time=0.0)
    harness.step()
    big = harness.add("big", tokens(rng("big"), 17), arrival_time=1.0)
    small = harness.add("small", [1, 2], max_tokens=2, arrival_time=2.0)
    return harness, big, small


@grades(schedule)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_nobody_jumps_the_queue(policy):
    harness, big, small = blocked(policy=policy)
    out = harness.scheduler.schedule()
    hint = '"big" waits for blocks; who comes after it waits as well, or a stream of small ones starves it'
    expect_equal(names(out.scheduled), ["old"], "request {i}", hint, SCHEDULER, CALL)
    harness.scheduler.undo(out)
    harness.drain()


@grades(schedule)
def test_a_failed_admission_changes_nothing():
    harness, random = Harness(num_blocks=8, max_num_batched_tokens=64), rng("failed admission")
    shared = tokens(random, 8)
    harness.add("first", shared, max_tokens=1)
    harness.drain()
    harness.add("old", tokens(random, 15), max_tokens=9)
    harness.step()
    late = harness.add("late", [*shared, *tokens(random, 12)])  # adopts two blocks and needs three more
    blocks, stats = harness.blocks, harness.blocks.stats

    def state():
        return {
            "num_computed_tokens": late.num_computed_tokens,
            "num_cached_tokens": late.num_cached_tokens,
            "stats.tokens_known": stats.tokens_known,
            "stats.tokens_adopted": stats.tokens_adopted,
            "num_free": blocks.num_free,
        }

    before = state()
    harness.step()
    hint = "adoption counts only once allocate_slots has succeeded"
    call = "schedule() that finds a prefix but not enough blocks"
    expect_equal(state(), before, "what it left", hint, SCHEDULER, call)
    expect(late.status is Status.WAITING, f"a request that was not admitted is {late.status.name}", see=SCHEDULER)
    harness.drain()


@grades(schedule)
def test_admission_never_preempts():
    harness = Harness(num_blocks=8, policy="priority")
    harness.add("low", tokens(rng("low"), 30), max_tokens=2, priority=5)
    harness.step()
    harness.add("high", tokens(rng("high"), 8), max_tokens=2, priority=0)
    out = harness.scheduler.schedule()
    expect_equal(names(out.preempted), [], "preempted request {i}", "the waiting one has to wait", SCHEDULER, CALL)
    expect_equal(names(out.scheduled), ["low"], "request {i}", see=SCHEDULER, call=CALL)
    harness.scheduler.undo(out)
    harness.drain()


def full_pool(*lengths, num_blocks, max_tokens=8, **settings):
    """Running decodes "0", "1", … that know `length` tokens each and together hold the whole pool."""
    harness = Harness(num_blocks=num_blocks, max_num_batched_tokens=64, enable_prefix_caching=False, **settings)
    priorities = range(len(lengths), 0, -1) if settings.get("policy") == "priority" else [0] * len(lengths)
    for i, (length, priority) in enumerate(zip(lengths, priorities, strict=True)):
        harness.add(str(i), tokens(rng(i), length - 1), max_tokens, priority=priority, arrival_time=float(i))
    harness.step()
    check_blocks(harness.blocks)
    return harness


@grades(schedule)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_last_in_order_is_preempted(policy):
    """Whoever is first needs a block; under the priority policy the one that was added last is first."""
    lengths = [5, 3, 3] if policy == "fcfs" else [3, 3, 5]
    harness = full_pool(*lengths, num_blocks=3, policy=policy)
    out = harness.scheduler.schedule()
    order = ["0", "1", "2"] if policy == "fcfs" else ["2", "1", "0"]
    hint = "the victim is the last of self.running"
    expect_equal(names(out.preempted), order[2:], f"preempted request {{i}}, order {order}", hint, SWAP, CALL)
    expect_equal(names(out.scheduled), order[:2], "planned request {i}", see=SCHEDULER, call=CALL)
    harness.scheduler.undo(out)
    harness.drain()


@grades(schedule)
def test_the_last_request_gives_way_itself():
    """It needs a block, none is free, and the others are in the plan already."""
    harness = full_pool(3, 3, 5, num_blocks=3)
    out = harness.scheduler.schedule()
    hint = "those before it are in this step's plan: a victim never is"
    expect_equal(names(out.preempted), ["2"], "preempted request {i}", hint, SCHEDULER, CALL)
    expect_equal(names(out.scheduled), ["0", "1"], "planned request {i}", hint, SCHEDULER, CALL)
    harness.scheduler.undo(out)
    harness.drain()


@grades(schedule)
def test_preempting_goes_on_until_the_request_fits():
    """Three drafts need two blocks more, and each of the others holds one."""
    harness = full_pool(4, 3, 3, 3, num_blocks=4)
    harness.scheduler.requests["0"].spec_token_ids = [1, 2, 3, 4, 5]
    out = harness.scheduler.schedule()
    expect_equal(
        names(out.preempted), ["3", "2"], "preempted request {i}", "one block each, two are needed", SWAP, CALL
    )
    expect_equal(counts(out.scheduled), [("0", 6), ("1", 1)], "(request, n) {i}", see=SCHEDULER, call=CALL)


@grades(schedule)
def test_a_step_that_preempted_admits_nobody():
    """Three blocks are free once "low" is gone, and "next" comes before it; but that has to wait for the next step."""
    harness = Harness(num_blocks=5, max_num_batched_tokens=64, enable_prefix_caching=False, policy="priority")
    harness.add("high", tokens(rng("high"), 4), priority=0)
    harness.add("low", tokens(rng("low"), 14), priority=2)
    harness.step()
    harness.add("next", [1, 2], priority=1)
    out = harness.scheduler.schedule()
    expect_equal(names(out.preempted), ["low"], "preempted request {i}", see=SWAP, call=CALL)
    fact = f"{names(out.admitted)} were admitted in the step that preempted 'low'"
    expect(not out.admitted, fact, "what was freed is for those who run", SCHEDULER)
    harness.scheduler.undo(out)
    harness.drain()
