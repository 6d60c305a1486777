"""Chapter 24: continuous batching in slots."""

import pytest
import torch

from engine import sampling
from engine.models.qwen3 import test_model
from engine.slot_cache import SlotCache
from engine.slots import ContinuousBatchingEngine, SlotRequest
from tests.grading import expect, expect_equal, expect_raises, grades, rng
from tests.prefix_model import VOCAB, PrefixModel, continuation

admit = ContinuousBatchingEngine.admit
prefill_chunk = ContinuousBatchingEngine.prefill_chunk
decode = ContinuousBatchingEngine.decode
step = ContinuousBatchingEngine.step

SLOTS = "24: Slots"
ADMISSION = "24: Admission"
PREFILL = "24: Prefill, a chunk at a time"
DECODE = "24: Decode, all rows at once"
STEP = "24: The step"

JUNK = 12_345.0  # what earlier requests have left in the cache; finite, as every computed key is


def new_engine(model=None, **options):
    """An engine whose cache is full of other requests' leftovers."""
    engine = ContinuousBatchingEngine(model or PrefixModel(), **{"num_slots": 4, "slot_len": 64, **options})
    engine.cache.k_cache.fill_(JUNK)
    engine.cache.v_cache.fill_(JUNK)
    return engine


def tokens(random, length, vocab=VOCAB):
    return [random.randrange(vocab) for _ in range(length)]


def place(engine, slot, prompt, output=(), num_computed=0):
    """A running request in `slot`, its first `num_computed` tokens computed, without the help of any exercise."""
    request = SlotRequest(f"slot {slot}", list(prompt), max_tokens=50, slot=slot, num_computed=num_computed)
    request.output_token_ids.extend(output)
    engine.slots[slot] = engine.requests[request.request_id] = request
    if num_computed:
        ids = torch.tensor([[*prompt, *output][:num_computed]])
        engine.forward(ids, torch.arange(num_computed)[None], engine.cache.view([slot], num_computed))
        engine.model.forwards.clear()
    return request


def place_decoding(engine, slot, random, prompt_len, generated=1):
    prompt = tokens(random, prompt_len)
    return place(engine, slot, prompt, continuation(prompt, generated), prompt_len + generated - 1)


def drain(engine, max_steps=400, each_step=None):
    """Tokens by request id, from steps until nothing is left; {id: finish reason} as well."""
    out, reasons = {}, {}
    for _ in range(max_steps):
        if not engine.has_unfinished:
            break
        for update in engine.step():
            expect(update.request_id not in reasons, f"{update.request_id!r} got a token after its last", see=STEP)
            out.setdefault(update.request_id, []).append(update.token_id)
            if update.finished:
                reasons[update.request_id] = update.finish_reason
        if each_step:
            each_step()
    expect(not engine.has_unfinished, f"requests are still unfinished after {max_steps} steps", see=STEP)
    expect(engine.slots == [None] * len(engine.slots), "a slot is still taken although nothing runs", see=SLOTS)
    return out, reasons


def other_rows(engine, slots):
    """The rows of the cache that a forward over `slots` has no business with."""
    rest = [i for i in range(len(engine.slots)) if i not in slots]
    return engine.cache.v_cache[:, rest].clone()


# Admission


@grades(admit)
@pytest.mark.parametrize("num_slots", [1, 3, 8])
@pytest.mark.parametrize("surplus", [-1, 0, 4])
def test_admission_is_first_come_first_served(num_slots, surplus):
    engine, count = new_engine(num_slots=num_slots), max(0, num_slots + surplus)
    for i in range(count):
        engine.add_request(i, [1 + i], max_tokens=2)
    admitted = engine.admit()
    fit = min(count, num_slots)
    call = f"admit() with {num_slots} slots and {count} waiting, ids 0, 1, …"
    about = {"hint": "from the front, until the queue or the free slots run out", "see": ADMISSION, "call": call}
    expect_equal([r.request_id for r in admitted], list(range(fit)), "admitted request {i}", **about)
    expect_equal([r.request_id for r in engine.waiting], list(range(fit, count)), "waiting request {i}", **about)
    running = sorted(r.request_id for r in engine.slots if r is not None)
    expect_equal(running, list(range(fit)), "request in slots, number {i},", **about)


@grades(admit)
def test_a_request_and_its_slot_know_each_other():
    engine = new_engine(num_slots=5)
    taken = [0, rng("taken").randrange(1, 5)]  # so no request can be in the slot of its number
    for slot in taken:
        place(engine, slot, [3, 4])
    for i in range(2):
        engine.add_request(i, [1, 2])
    for request in engine.admit():
        expect(
            request.slot is not None and engine.slots[request.slot] is request,
            f"request {request.request_id} says it is in slot {request.slot}, but that slot does not hold it",
            hint=f"slots {sorted(taken)} were taken before; set both slots[i] and request.slot",
            see=ADMISSION,
        )


@grades(admit)
def test_admission_fills_holes_beside_running_requests():
    engine, random = new_engine(num_slots=6), rng("holes")
    free = sorted(random.sample(range(6), 3))
    running = {slot: place(engine, slot, [5, 6, 7]) for slot in range(6) if slot not in free}
    for i in range(5):
        engine.add_request(i, [1, 2])
    admitted = engine.admit()
    call = f"admit() with slots {free} free among 6 and five waiting"
    about = {"hint": "a free slot is used at once, whatever else is running", "see": ADMISSION}
    for slot, request in running.items():
        expect(engine.slots[slot] is request, f"{call}: the running request in slot {slot} was displaced", **about)
    expect_equal([r.request_id for r in admitted], [0, 1, 2], "admitted request {i}", call=call, **about)
    expect_equal(sorted(r.slot for r in admitted), free, "slot of an admitted request, entry {i},", call=call, **about)
    expect_equal(engine.admit(), [], "a second admit() with all slots taken, entry {i},", see=ADMISSION)


@grades(admit)
def test_admission_computes_and_clears_nothing():
    engine = new_engine()
    before = engine.cache.v_cache.clone()
    engine.add_request("a", [1, 2, 3])
    engine.admit()
    expect(engine.num_forward == 0, f"admit() ran {engine.num_forward} forwards; prefill has its own method")
    expect(
        torch.equal(engine.cache.v_cache, before),
        "admit() wrote to the cache",
        hint="what an earlier owner left is hidden by the causal mask until it is overwritten",
        see=SLOTS,
    )


# Prefill


@grades(prefill_chunk)
@pytest.mark.parametrize("chunk_size", [1, 4, 7, 64])
def test_chunks_cover_the_prompt_once(chunk_size):
    engine, prompt = new_engine(chunk_size=chunk_size), tokens(rng(f"chunks {chunk_size}"), 14)
    request = place(engine, 2, prompt)
    for start in range(0, 14, chunk_size):
        end = min(start + chunk_size, 14)
        call = f"prefill_chunk at num_computed {start} of 14, chunk_size {chunk_size}"
        token = engine.prefill_chunk(request)
        expect_equal(request.num_computed, end, "num_computed afterwards", see=PREFILL, call=call)
        shape = [(1, end - start, end)]
        expect_equal(engine.model.forwards, shape, "forward {i} as (rows, tokens, keys read)", see=PREFILL, call=call)
        engine.model.forwards.clear()
        if end < 14:
            expect(token is None, f"{call}: expected None, got {token!r}; the prompt is not complete", see=PREFILL)
    hint = "each prompt token at its own position, all of them once, and the token is sampled from the last row"
    expect_equal(token, continuation(prompt, 1)[0], "first output token", hint=hint, see=PREFILL)
    expect_equal(request.output_token_ids, [], "output token {i}", hint="step appends it, through accept", see=PREFILL)


@grades(prefill_chunk)
def test_only_the_last_prompt_row_reaches_the_lm_head():
    engine, prompt = new_engine(chunk_size=5), tokens(rng("head"), 13)
    request = place(engine, 0, prompt)
    for _ in range(2):
        engine.prefill_chunk(request)
    hint = "the logits in the middle of a prompt predict tokens that are already known"
    expect_equal(engine.model.head_rows, [], "LM head call {i} before the prompt's last chunk", hint=hint, see=PREFILL)
    engine.prefill_chunk(request)
    expect_equal(engine.model.head_rows, [1], "rows in LM head call {i} of the last chunk", hint=hint, see=PREFILL)


@grades(prefill_chunk)
def test_a_prefill_stays_in_its_row():
    engine, random = new_engine(), rng("row")
    slot = random.randrange(1, 4)
    request, before = place(engine, slot, tokens(random, 9)), other_rows(engine, [slot])
    engine.prefill_chunk(request)
    expect(
        torch.equal(other_rows(engine, [slot]), before),
        f"a prefill of the request in slot {slot} wrote into other slots",
        hint="the view is over [request.slot]",
        see=SLOTS,
    )


@grades(prefill_chunk)
@pytest.mark.parametrize("where", ["forward", "LM head"])
def test_a_failed_prefill_can_be_repeated(where):
    engine, prompt = new_engine(chunk_size=6), tokens(rng("again"), 10)
    request = place(engine, 1, prompt, num_computed=6)
    engine.model.fail_forward_in, engine.model.fail_head_in = (1, 0) if where == "forward" else (0, 1)
    expect_raises(MemoryError, engine.prefill_chunk, request, see=PREFILL)
    expect_equal(request.num_computed, 6, f"num_computed after a {where} that raised", hint="move it last", see=PREFILL)
    token = engine.prefill_chunk(request)
    expect_equal(token, continuation(prompt, 1)[0], "first token at the second try", see=PREFILL)


# Decode


@grades(decode)
@pytest.mark.parametrize("slots", [[0], [3], [0, 1, 2, 3], [1, 2], [0, 3], [3, 0, 2]], ids=str)
def test_decode_continues_each_request_as_if_alone(slots):
    engine, random = new_engine(), rng(f"decode {slots}")
    lengths = random.sample(range(1, 40), len(slots))
    requests = [place_decoding(engine, s, random, n, random.randint(1, 4)) for s, n in zip(slots, lengths, strict=True)]
    for round_ in range(3):
        got = engine.decode(list(requests))
        expected = [continuation(r.prompt_token_ids + r.output_token_ids, 1)[0] for r in requests]
        call = f"decode of slots {slots} with {[r.num_computed for r in requests]} computed, round {round_}"
        hint = "newest token in, at its own position, keys up to and including it; tokens in the order given"
        expect_equal(got, expected, "token of request {i}", hint=hint, see=DECODE, call=call)
        for r, token in zip(requests, got, strict=True):
            known = len(r.prompt_token_ids) + len(r.output_token_ids)
            hint = "the input token has K/V now, the new one does not"
            expect_equal(r.num_computed, known, f"num_computed of {r.request_id}", hint=hint, see=DECODE, call=call)
            r.output_token_ids.append(token)


@grades(decode)
def test_decode_is_one_forward_over_the_given_rows():
    engine, random = new_engine(num_slots=6), rng("one forward")
    given = random.sample(range(6), 3)
    lengths = random.sample(range(5, 50), 6)
    placed = [place_decoding(engine, slot, random, lengths[slot]) for slot in range(6)]
    before = other_rows(engine, given)
    engine.decode([placed[slot] for slot in given])
    longest = max(lengths[slot] for slot in given) + 1
    call = f"decode of 3 requests out of 6, the longest with {longest - 1} tokens computed"
    expect_equal(len(engine.model.forwards), 1, "number of forwards", see=DECODE, call=call)
    expect_equal(engine.model.forwards[0][:2], (3, 1), "(rows, tokens a row), entry {i},", see=DECODE, call=call)
    hint = "as long as the longest request after the new token; the rest of slot_len is not worth reading"
    expect_equal(engine.model.forwards[0][2], longest, "keys read", hint=hint, see=DECODE, call=call)
    expect(torch.equal(other_rows(engine, given), before), f"{call}: it wrote into slots of other requests", see=DECODE)
    expect_equal(engine.model.head_rows, [3], "rows in LM head call {i}", see=DECODE, call=call)


@grades(decode)
@pytest.mark.parametrize("where", ["forward", "LM head"])
def test_a_failed_decode_can_be_repeated(where):
    engine, random = new_engine(), rng("again, decode")
    requests = [place_decoding(engine, slot, random, 5 + 3 * slot) for slot in range(3)]
    before = [r.num_computed for r in requests]
    engine.model.fail_forward_in, engine.model.fail_head_in = (1, 0) if where == "forward" else (0, 1)
    expect_raises(MemoryError, engine.decode, requests, see=DECODE)
    after = [r.num_computed for r in requests]
    what = f"num_computed of request {{i}} after a {where} that raised"
    expect_equal(after, before, what, hint="move it last", see=DECODE)
    expected = [continuation(r.prompt_token_ids, 2)[1] for r in requests]
    expect_equal(engine.decode(requests), expected, "token of request {i} at the second try", see=DECODE)


# The step


def simulate(jobs, num_slots, chunk_size):
    """The chapter's schedule without an engine: for each step the requests that get a token, and how many forwards.

    jobs: {id: (arrival step, prompt length, output length)} in order of arrival.
    """
    left = {i: [prompt, output] for i, (_, prompt, output) in jobs.items()}
    active, steps = [], []
    while left:
        now = len(steps)
        queue = [i for i in left if i not in active and jobs[i][0] <= now]
        active += queue[: num_slots - len(active)]
        prefilling = [i for i in active if left[i][0] > 0]
        got = [i for i in active if left[i][0] <= chunk_size]
        steps.append((sorted(got), len(prefilling) + (len(prefilling) < len(active))))
        for i in prefilling:
            left[i][0] -= chunk_size
        for i in got:
            left[i][1] -= 1
            if left[i][1] == 0:
                del left[i]
                active.remove(i)
    return steps


@grades(step)
@pytest.mark.parametrize("case", range(6))
def test_steps_follow_the_schedule(case):
    random = rng(f"schedule {case}")
    num_slots, chunk_size = 1 + case % 4, (2, 5, 64)[case % 3]
    arrivals = sorted([0, 0, *random.sample(range(1, 12), 6)])
    jobs = {i: (at, random.randint(1, 14), random.randint(1, 9)) for i, at in enumerate(arrivals)}
    prompts = {i: tokens(random, n) for i, (_, n, _) in jobs.items()}
    engine, progress = new_engine(num_slots=num_slots, chunk_size=chunk_size), dict.fromkeys(jobs, 0)
    for now, (got_one, forwards) in enumerate(simulate(jobs, num_slots, chunk_size)):
        for i, (at, _, max_tokens) in jobs.items():
            if at == now:
                engine.add_request(i, prompts[i], max_tokens)
        ran, steps_before = engine.num_forward, engine.num_steps
        updates = sorted(engine.step(), key=lambda u: u.request_id)
        call = f"step {now}, {num_slots} slots, chunk_size {chunk_size}, {{id: (arrival, prompt, output)}} {jobs}"
        ids = [u.request_id for u in updates]
        expect_equal(ids, got_one, "request that got a token, entry {i},", see=STEP, call=call)
        expect_equal(engine.num_forward - ran, forwards, "forwards in this step", see=STEP, call=call)
        expect_equal(engine.num_steps - steps_before, int(forwards > 0), "growth of num_steps", see=STEP, call=call)
        for update in updates:
            i = update.request_id
            expected = continuation(prompts[i], progress[i] + 1)[-1]
            expect_equal(update.token_id, expected, f"output token {progress[i]} of request {i}", see=STEP, call=call)
            progress[i] += 1
            expect_equal(update.finished, progress[i] == jobs[i][2], f"finished, of request {i}", see=STEP, call=call)
    expect(not engine.has_unfinished, "requests are left after the last step of the schedule", see=STEP)


@grades(step)
def test_an_idle_step_counts_nothing():
    engine = new_engine()
    expect_equal(engine.step(), [], "update {i} of a step without any request", see=STEP)
    expect_equal(engine.num_steps, 0, "num_steps after a step without any request", see=STEP)


@grades(step)
def test_a_long_prompt_does_not_silence_the_others():
    engine, random = new_engine(chunk_size=4), rng("long prompt")
    talking = place_decoding(engine, 0, random, 6)
    engine.add_request("long", tokens(random, 40), max_tokens=2)
    for n in range(9):
        ids = [u.request_id for u in engine.step()]
        call = f"step {n} while a prompt of 40 goes in by chunks of 4"
        expect(talking.request_id in ids, f"{call}: the request that was decoding got no token", see=STEP)


@grades(step)
def test_a_step_that_raises_loses_nothing():
    engine, random = new_engine(), rng("raises")
    old = place_decoding(engine, 0, random, 6)
    old.max_tokens = 5
    prompt = tokens(random, 8)
    engine.add_request("new", prompt, max_tokens=3)
    engine.model.fail_forward_in = 2
    expect_raises(MemoryError, engine.step, see=STEP)
    hint = "its prefill was done before the decode failed, so its token was accepted at once"
    ids = [u.request_id for u in engine.updates]
    expect_equal(ids, ["new"], "update {i} kept after a decode that raised", hint=hint, see=STEP)
    out, _ = drain(engine)
    expect_equal(out["new"], continuation(prompt, 3), "token {i} of the request admitted in the failed step", see=STEP)
    expected = continuation(old.prompt_token_ids, 5)[1:]
    expect_equal(out[old.request_id], expected, "token {i} of the request whose decode failed", see=STEP)


# The whole engine

ALL = (admit, prefill_chunk, decode, step)


@grades(*ALL)
@pytest.mark.parametrize("case", range(8))
def test_every_request_is_answered_as_if_alone(case):
    random = rng(f"alone {case}")
    engine = new_engine(num_slots=random.randint(1, 5), slot_len=40, chunk_size=random.choice([1, 3, 8, 512]))
    jobs = [(tokens(random, random.randint(1, 20)), random.randint(1, 20)) for _ in range(14)]
    late = iter(enumerate(jobs))
    for _ in range(random.randint(1, 6)):
        i, (prompt, max_tokens) = next(late)
        engine.add_request(i, prompt, max_tokens)

    def arrive():
        for i, (prompt, max_tokens) in late:
            engine.add_request(i, prompt, max_tokens)
            if random.random() < 0.5:
                break

    out, _ = drain(engine, each_step=arrive)
    for i, (prompt, max_tokens) in enumerate(jobs):
        expect_equal(out.get(i), continuation(prompt, max_tokens), f"token {{i}} of request {i}", see=SLOTS)


@grades(*ALL)
@pytest.mark.parametrize("chunk_size", [1, 6, 512])
def test_real_model_equals_generate(chunk_size):
    random, model = rng(f"real {chunk_size}"), test_model()
    engine = new_engine(model, num_slots=3, slot_len=64, chunk_size=chunk_size)
    jobs = [(tokens(random, random.randint(1, 24), 199), random.randint(1, 24)) for _ in range(7)]
    for i, (prompt, max_tokens) in enumerate(jobs):
        engine.add_request(i, prompt, max_tokens)
    out, _ = drain(engine)
    for i, (prompt, max_tokens) in enumerate(jobs):
        expected = sampling.generate(model, prompt, max_tokens)
        expect_equal(out.get(i), expected, f"token {{i}} of request {i}, against sampling.generate,", see=SLOTS)


@grades(*ALL)
def test_seeded_sampling_does_not_depend_on_the_neighbours():
    random, model = rng("seeded"), test_model()
    engine = new_engine(model, num_slots=2)
    settings = {"max_tokens": 12, "temperature": 0.9, "top_k": 30, "top_p": 0.95}
    prompts = [tokens(random, random.randint(1, 12), 199) for _ in range(5)]
    for i, prompt in enumerate(prompts):
        engine.add_request(i, prompt, **({"seed": 100 + i, **settings} if i % 2 else {"max_tokens": 9}))
    out, _ = drain(engine)
    for i in (1, 3):
        alone = sampling.generate(model, prompts[i], generator=torch.Generator().manual_seed(100 + i), **settings)
        expect_equal(out.get(i), alone, f"token {{i}} of sampled request {i}", see=DECODE)


@grades(*ALL)
def test_requests_end_where_they_should():
    random = rng("ends")
    prompt = tokens(random, 6)
    full = continuation(prompt, 12)
    eos = full[random.randint(2, 8)]
    engine = new_engine(num_slots=2, eos_token_id=(eos, VOCAB + 5))
    engine.add_request("stops", prompt, max_tokens=12)
    engine.add_request("ignores", prompt, max_tokens=12, ignore_eos=True)
    engine.add_request("one", prompt, max_tokens=1, ignore_eos=True)
    engine.add_request("eos inside the prompt", [eos, *prompt], max_tokens=3)
    out, reasons = drain(engine)
    stopped = continuation(prompt, 12, stop=(eos,))
    expect_equal(out["stops"], stopped, "token {i} of a request that meets its eos", see=STEP)
    expect_equal(out["ignores"], full, "token {i} of a request with ignore_eos", see=STEP)
    expect_equal(out["one"], full[:1], "token {i} with max_tokens=1", see=STEP)
    inside = continuation([eos, *prompt], 3, stop=(eos,))
    expect_equal(out["eos inside the prompt"], inside, "token {i} with the eos id inside the prompt", see=STEP)
    got = [reasons["stops"], reasons["ignores"], reasons["one"]]
    expect_equal(got, ["stop", "length", "length"], "finish reason {i}", see=STEP)


@grades(*ALL)
def test_aborts_free_the_slot_and_disturb_nobody():
    random = rng("aborts")
    engine = new_engine(num_slots=2, chunk_size=3)
    jobs = {i: tokens(random, random.randint(4, 12)) for i in range(6)}
    for i, prompt in jobs.items():
        engine.add_request(i, prompt, max_tokens=10)
    got = {i: [] for i in jobs}
    for n in range(2):
        for update in engine.step():
            got[update.request_id].append(update.token_id)
        expect(engine.abort_request(n), f"request {n} was running and could not be aborted", see=SLOTS)
    expect(engine.abort_request(5), "request 5 was waiting and could not be aborted", see=SLOTS)
    expect(not engine.abort_request(5), "a request could be aborted twice", see=SLOTS)
    for i, new in drain(engine)[0].items():
        got[i] += new
    for i in (2, 3, 4):
        expect_equal(got[i], continuation(jobs[i], 10), f"token {{i}} of request {i}, after the aborts", see=SLOTS)
    expect_equal(got[5], [], "token {i} of a request aborted while it waited", see=SLOTS)


@grades(*ALL)
def test_generate_answers_in_order_and_leaves_the_engine_idle():
    random = rng("generate")
    prompts, limits = [tokens(random, random.randint(1, 9)) for _ in range(7)], [random.randint(1, 9) for _ in range(7)]
    engine = new_engine(num_slots=3)
    for max_tokens in (limits, 4):
        each = limits if max_tokens is limits else [4] * 7
        for i, got in enumerate(engine.generate(prompts, max_tokens)):
            expect_equal(got, continuation(prompts[i], each[i]), f"token {{i}} of prompt {i}", see=STEP)
    expect_raises(ValueError, engine.generate, [[1], [2], []], match="empty")
    expect(not engine.has_unfinished, "requests of a refused generate() are still in the engine")
    engine.add_request("other", [1])
    expect_raises(RuntimeError, engine.generate, [[1]], match="idle")


# What is given


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"prompt_token_ids": []}, "empty"),
        ({"prompt_token_ids": [1, VOCAB]}, f"token 1 is {VOCAB}"),
        ({"prompt_token_ids": [-1]}, "token 0 is -1"),
        ({"request_id": "live"}, "'live' is in use"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt_token_ids": [1] * 40, "max_tokens": 25}, "do not fit a slot of 64"),
        ({"temperature": -0.1}, "temperature -0.1"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"top_k": -1}, "top_k -1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refusals_leave_the_engine_untouched(change, match):
    engine = new_engine()
    engine.add_request("live", [1, 2])
    request = {"request_id": "new", "prompt_token_ids": [1, 2], "max_tokens": 4, **change}
    expect_raises(ValueError, engine.add_request, **request, match=match)
    expect_equal(list(engine.requests), ["live"], "live request {i}")
    expect_equal([r.request_id for r in engine.waiting], ["live"], "waiting request {i}")


def test_a_request_may_fill_its_slot_exactly():
    new_engine().add_request("fits", [1] * 40, max_tokens=24)


@pytest.mark.parametrize("options", [{"num_slots": 0}, {"slot_len": 0}, {"chunk_size": 0}, {"slot_len": 5000}], ids=str)
def test_impossible_engines_are_refused(options):
    expect_raises(ValueError, ContinuousBatchingEngine, PrefixModel(), **options, match=str(*options.values()))


def test_the_size_of_the_cache():
    engine = ContinuousBatchingEngine(PrefixModel())
    expect_equal(engine.kv_slots, 8 * 320, "kv_slots of the default engine")
    expect_equal(list(engine.cache.k_cache.shape), [2, 8, 2, 320, 2], "size of k_cache, axis {i},")


@pytest.mark.parametrize("slots", [[2], [1, 2], [2, 0], [0, 3]], ids=str)
def test_a_view_writes_and_reads_its_rows(slots):
    cache, torch_rng = SlotCache(2, 4, 3, 8, 5, torch.float32, "cpu"), rng.torch("view")
    for kind in (cache.k_cache, cache.v_cache):
        kind.copy_(torch.randn(kind.shape, generator=torch_rng))
    expected_k, expected_v = cache.k_cache.clone(), cache.v_cache.clone()
    k, v = torch.randn(2, len(slots), 3, 2, 5, generator=torch_rng)  # each [B, Hkv, T, D]
    starts = [3, 1][: len(slots)]
    positions = torch.tensor([[s, s + 1] for s in starts])
    for b, (slot, start) in enumerate(zip(slots, starts, strict=True)):
        expected_k[1, slot, :, start : start + 2], expected_v[1, slot, :, start : start + 2] = k[b], v[b]
    got_k, got_v, k_pos, allowed = cache.view(slots, 6).append(1, k, v, positions)
    for got, whole, expected in ((got_k, cache.k_cache, expected_k), (got_v, cache.v_cache, expected_v)):
        expect(torch.equal(whole, expected), f"append wrote something else than rows {slots} at {positions.tolist()}")
        expect(torch.equal(got, expected[1, slots, :, :6]), "append returned other keys than 0 to 5 of these rows")
    expect_equal(k_pos, torch.arange(6), "position of key {i}")
    expect(allowed is None, "no extra mask is needed")


@pytest.mark.parametrize(("slots", "length"), [([], 1), ([0, 0], 1), ([-1], 1), ([4], 1), ([0], 0), ([0], 9)])
def test_impossible_views_are_refused(slots, length):
    expect_raises(ValueError, SlotCache(1, 4, 1, 8, 2, torch.float32, "cpu").view, slots, length)
