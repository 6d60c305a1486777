"""Costs that stay flat, counted and not timed: lines that run, objects that are looked at, items that are copied."""

import json
import sys
from types import SimpleNamespace

import pytest

from engine.milestones import overhead
from engine.milestones.faults import CODE
from engine.serve import blocks as blocks_module
from engine.serve.request import Request, SamplingParams, Status
from tests.ch31.fake_pool import fake_core
from tests.ch31.harness import tokens
from tests.grading import rng


def lines_of(call) -> int:
    """Lines of the core's code that run in a call."""
    count, before = 0, sys.gettrace()

    def line(frame, event, _):
        nonlocal count
        count += event == "line"
        return line

    sys.settrace(lambda frame, event, _: line if frame.f_code.co_filename.startswith(CODE) else None)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


class Tokens(list):
    """A list that counts the items that anybody reads."""

    read = 0

    def __getitem__(self, index):
        found = list.__getitem__(self, index)
        Tokens.read += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self):
        for item in list.__iter__(self):
            Tokens.read += 1
            yield item

    def __add__(self, other):
        Tokens.read += len(self)
        return list.__add__(self, other)


class Watched(Request):
    """A request that counts how often it is compared with another one."""

    compared = 0

    def __eq__(self, other):
        Watched.compared += 1
        return self is other

    __hash__ = object.__hash__


def decoding(count, kind=Request, policy="fcfs", **params):
    """A core in which so many requests decode."""
    core = fake_core(
        num_blocks=count * 4, block_size=16, max_num_seqs=count, max_num_batched_tokens=16 * count, policy=policy
    )
    for i in range(count):
        params = {"max_tokens": 40, "ignore_eos": True, **params}
        core.scheduler.add(kind(f"r{i}", [1 + i % 50] * (3 + i % 8), SamplingParams(**params), priority=i % 3))
    core.step()
    assert core.scheduler.num_running == count
    return core


def test_a_step_runs_as_many_lines_for_each_request_whatever_their_number():
    per_request = {}
    for count in (32, 1024):
        core = decoding(count)
        core.runner = overhead.NoForward()
        per_request[count] = lines_of(core.step) / count
    assert per_request[1024] <= 1.3 * per_request[32], per_request


@pytest.mark.parametrize("settings", [{}, {"logprobs": 0}], ids=["plain", "logprobs"])
def test_a_long_output_costs_a_step_no_more_than_a_short_one(settings):
    lines, read = {}, {}
    for length in (20, 2000):
        core = fake_core(num_blocks=300, block_size=16)
        core.add_request("r", [1, 2, 3], SamplingParams(max_tokens=3000, ignore_eos=True, **settings))
        core.step()
        core.runner = overhead.NoForward()
        request = core.scheduler.requests["r"]
        while request.num_output_tokens < length:
            request.append(5)
        core.blocks.allocate_slots(request, length)
        request.num_computed_tokens = request.num_tokens - 1
        core.blocks.cache_full_blocks(request)
        request.token_ids, Tokens.read = Tokens(request.token_ids), 0
        outputs = []
        lines[length] = lines_of(lambda core=core, outputs=outputs: outputs.extend(core.step()))
        read[length] = Tokens.read
        assert [o.num_output_tokens for o in outputs] == [request.num_output_tokens]
    assert lines[2000] == lines[20] and read[2000] == read[20] <= 4, (lines, read)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_leaving_a_thousand_running_requests_compares_few_of_them(policy):
    core = decoding(1024, Watched, policy)
    abort, preempt = (lambda request: core.abort_request(request.request_id)), core.scheduler.stop_running
    for leave in (abort, preempt, abort):
        running, Watched.compared = core.scheduler.running.copy(), 0
        assert lines_of(lambda leave=leave, running=running: leave(running[700])) < 200
        assert Watched.compared == 0, "`running` is sorted: there is no need to ask one after the other"
        del running[700]
        assert all(a is b for a, b in zip(core.scheduler.running, running, strict=True))


def test_a_thousand_requests_that_end_in_one_step_are_not_searched_for():
    core = decoding(1024, Watched, max_tokens=2)
    core.runner, Watched.compared = overhead.NoForward(), 0
    assert all(output.finished for output in core.step()) and not core.has_unfinished
    assert Watched.compared == 0


def test_running_in_another_order_is_left_all_the_same():
    """A scheduler of one's own may keep another order."""
    core = decoding(8)
    core.scheduler.running.reverse()
    core.abort_request("r2")
    assert [r.request_id for r in core.scheduler.running] == ["r7", "r6", "r5", "r4", "r3", "r1", "r0"]
    core.blocks.check()


def test_many_samples_of_one_prompt_end_at_the_cost_of_as_many_requests():
    lines = {}
    for n in (20, 400):
        core = fake_core(num_blocks=n, max_num_seqs=n, max_num_batched_tokens=4 * n)
        core.add_request("r", [1, 2, 3], SamplingParams(max_tokens=1, n=n))
        assert isinstance(core.children["r"], dict), "a list would be searched for each of them"
        lines[n] = lines_of(core.step) / n
        assert not core.children
    assert lines[400] <= 1.3 * lines[20], lines


def test_a_prompt_is_hashed_once_a_block_however_often_it_is_looked_up(monkeypatch):
    hashed, hash_block = [], blocks_module.hash_block

    def counted(parent, block, extra=()):
        hashed.append(len(block))
        return hash_block(parent, block, extra)

    monkeypatch.setattr(blocks_module, "hash_block", counted)
    lines = {}
    for blocks in (16, 256):
        core = fake_core(num_blocks=blocks + 1, block_size=16)
        request = Request("r", tokens(rng("lookup"), 16 * blocks + 1))
        hashed.clear()
        cold = lines_of(lambda core=core, request=request: core.blocks.find_cached_prefix(request))
        for _ in range(5):
            core.blocks.find_cached_prefix(request)
        assert core.blocks.allocate_slots(request, 16 * blocks)
        core.blocks.cache_full_blocks(request, 16 * blocks)
        assert hashed == [16] * blocks
        again = lines_of(lambda core=core, request=request: core.blocks.find_cached_prefix(request))
        free = lines_of(lambda core=core, request=request: core.blocks.free(request))
        lines[blocks] = [count / blocks for count in (cold, again, free)]
    assert all(large <= 1.1 * small for small, large in zip(*lines.values(), strict=True)), lines


def test_tokens_of_a_prompt_are_read_a_fixed_number_of_times():
    """Chunk by chunk: twice over all, for the batch and for the hashes."""
    core = fake_core(num_blocks=300, block_size=16, max_num_batched_tokens=64)
    core.add_request("r", tokens(rng("chunks"), 2048), SamplingParams(max_tokens=1))
    request, core.runner = core.scheduler.requests["r"], overhead.NoForward()
    request.token_ids, Tokens.read = Tokens(request.token_ids), 0
    while core.has_unfinished:
        core.step()
    assert request.status is Status.FINISHED_LENGTH and Tokens.read <= 2 * 2048 + 10


def test_the_command_prints_a_line_for_every_figure(monkeypatch, capsys):
    small = {"DECODES": [2, 1, 4], "AHEAD": [2, 4], "QUEUES": [3, 6], "RUNNING": [2, 4], "PROMPTS": [32, 64]}
    for name, sizes in small.items():
        monkeypatch.setattr(overhead, name, sizes)
    assert overhead.main(SimpleNamespace(repeat=2)) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 3 + 3 * 2 + 4 * 2 + 2 + 3 * 2 and all(line["us"] > 0 and line["ratio"] > 0 for line in lines)
    assert {line["size"] for line in lines if line["what"] == "step of decodes"} == {1, 2, 4}
    with pytest.raises(ValueError, match="--repeat"):
        overhead.main(SimpleNamespace(repeat=0))
