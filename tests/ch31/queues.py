"""The two queues of waiting requests: their order, and that a long one costs no more than it must."""

import math

import pytest

from engine.serve.queue import FCFSQueue, PriorityQueue
from engine.serve.request import Request
from tests.ch31.fake_pool import SCHEDULER, fake_core
from tests.grading import expect, expect_equal, rng

LONG = 10_000


class Counted(float):
    """A number that counts how often it is compared."""

    comparisons = 0

    def __lt__(self, other):
        Counted.comparisons += 1
        return float(self) < float(other)

    def __eq__(self, other):
        Counted.comparisons += 1
        return float(self) == float(other)

    __hash__ = float.__hash__


class Watched(Request):
    """A request that counts how often it is hashed or compared with another one."""

    touched = 0

    def __eq__(self, other):
        Watched.touched += 1
        return self is other

    def __hash__(self):
        Watched.touched += 1
        return id(self) >> 4


def request(name, priority=0, arrival=0.0, kind=Request):
    return kind(name, [1], priority=priority, arrival_time=arrival)


def order(queue):
    names = []
    while queue:
        first = queue.first()
        names.append(first.request_id)
        queue.remove(first)
    return names


def test_first_come_first_served_and_the_preempted_before_all():
    queue = FCFSQueue()
    requests = {name: request(name) for name in "abcde"}
    for name in "abc":
        queue.add(requests[name])
    for name in "de":
        queue.put_back(requests[name])
    expect_equal([r.request_id for r in queue], list("edabc"), "place {i}", see=SCHEDULER)
    queue.remove(requests["a"])
    expect(requests["a"] not in queue and requests["b"] in queue, "`in` does not follow `remove`", see=SCHEDULER)
    expect_equal(len(queue), 4, "length", see=SCHEDULER)
    expect_equal(order(queue), list("edbc"), "order of service, place {i}", see=SCHEDULER)


def test_a_priority_queue_is_sorted_whatever_comes_and_goes():
    random, queue, live = rng("priority queue"), PriorityQueue(), []
    for number in range(400):
        if live and random.random() < 0.45:
            gone = random.choice(live)
            queue.remove(gone)
            live.remove(gone)
            if random.random() < 0.3:  # preempted or undone: the same request comes back
                queue.put_back(gone)
                live.append(gone)
        else:
            new = request(number, random.randrange(3), float(random.randrange(4)))
            new.order = number
            queue.add(new)
            live.append(new)
        best = min(live, key=lambda r: (r.priority, r.arrival_time, r.order), default=None)
        if best is not None:
            expect_equal(queue.first().request_id, best.request_id, f"first after {number} operations", see=SCHEDULER)
        expect_equal(len(queue), len(live), "length", see=SCHEDULER)
    expected = [r.request_id for r in sorted(live, key=lambda r: (r.priority, r.arrival_time, r.order))]
    expect_equal([r.request_id for r in queue], expected, "place {i}", see=SCHEDULER)
    expect_equal(order(queue), expected, "order of service, place {i}", see=SCHEDULER)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_joining_and_leaving_a_long_queue_costs_little(policy):
    """Counted in comparisons and look-ups, not in seconds."""
    scheduler = fake_core(policy=policy).scheduler
    most = 8 * math.ceil(math.log2(LONG)) if policy == "priority" else 0
    Counted.comparisons = 0
    for i in range(LONG):
        scheduler.add(request(f"r{i}", Counted(5), Counted(i), Watched))
        fact = f"adding {i + 1} requests compared {Counted.comparisons} numbers"
        expect(Counted.comparisons <= most * (i + 1), fact, f"{most} each are allowed", SCHEDULER)
    first = "late" if policy == "priority" else "r0"
    late = request("late", Counted(1), Counted(LONG), Watched)
    actions = {
        "adding one more": lambda: scheduler.add(late),
        "looking at the first": lambda: expect_equal(
            scheduler.waiting.first().request_id, first, "first", see=SCHEDULER
        ),
        "aborting one in the middle": lambda: scheduler.abort(f"r{LONG // 2}"),
    }
    for what, action in actions.items():
        Counted.comparisons = Watched.touched = 0
        action()
        numbers, looked = Counted.comparisons, Watched.touched
        expect(numbers <= most, f"{what} of {LONG} compared {numbers} numbers, {most} allowed", see=SCHEDULER)
        expect(looked <= 20, f"{what} of {LONG} looked at {looked} requests", see=SCHEDULER)


def test_a_priority_queue_forgets_who_left():
    queue, stays = PriorityQueue(), request("stays")
    queue.add(stays)
    for number in range(5_000):
        passing = request(number, priority=1)
        passing.order = number + 1
        queue.add(passing)
        queue.remove(passing)
    held = len(queue._heap)
    expect(held < 100, f"a queue of one request still holds {held} entries of those that left", see=SCHEDULER)
