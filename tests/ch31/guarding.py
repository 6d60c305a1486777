"""What add_request must refuse so that one bad caller cannot stop the others, and states that are easy to forget."""

import pytest

from engine.models.qwen3 import test_model
from engine.sampling import generate
from engine.serve.config import EngineConfig
from engine.serve.engine import EngineCore
from engine.serve.request import SamplingParams

MODEL = test_model()


def drain(core):
    final = {}
    for _ in range(200):
        if not core.has_unfinished:
            break
        final.update((output.request_id, output.output_token_ids) for output in core.step())
        core.blocks.check()
    return final


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize(
    "bad",
    [
        {"cache_key": (["x"],)}, {"cache_key": "ab"}, {"cache_key": 5}, {"cache_key": ((object(),),)},
        {"priority": "high"}, {"priority": float("nan")}, {"arrival_time": float("nan")}, {"arrival_time": "now"},
    ],
    ids=str,
)  # fmt: skip
def test_a_request_that_could_break_a_later_step_is_refused_at_once(policy, bad):
    core = EngineCore(MODEL, EngineConfig(policy=policy))
    prompt, params = [3] * 20, SamplingParams(max_tokens=3)
    core.add_request("good", prompt, params)
    with pytest.raises(ValueError, match="request 'bad'"):
        core.add_request("bad", prompt, params, **bad)
    assert core.scheduler.num_waiting == 1 and list(core.scheduler.requests) == ["good"]
    assert drain(core) == {"good": generate(MODEL, prompt, 3)}


@pytest.mark.parametrize(
    "settings",
    [{"temperature": None}, {"temperature": "1"}, {"top_p": None}, {"stop_token_ids": 5}, {"ignore_eos": "no"}],
    ids=str,
)
def test_parameters_of_a_wrong_type_are_a_value_error(settings):
    (name,) = settings
    with pytest.raises(ValueError, match=name):
        SamplingParams(**settings)


@pytest.mark.parametrize("settings", [{"seed": None}, {"seed": [1]}, {"enable_prefix_caching": "no"}], ids=str)
def test_settings_of_a_wrong_type_are_a_value_error(settings):
    (name,) = settings
    with pytest.raises(ValueError, match=name):
        EngineConfig(**settings)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_drafts_that_outgrow_the_pool_preempt_their_own_request_and_lose_nothing(mode):
    """Nothing is scheduled in that step, but with swapping there are blocks to copy all the same."""
    config = EngineConfig(block_size=4, num_blocks=4, preemption_mode=mode, enable_prefix_caching=False)
    core, prompt = EngineCore(MODEL, config), [5, 6, 7, 8, 9, 10, 11]
    core.add_request("a", prompt, SamplingParams(max_tokens=9))
    for _ in range(5):
        core.step()
    core.scheduler.requests["a"].spec_token_ids = [1] * 12
    assert core.step() == []
    assert core.stats()["preemptions"] == 1
    assert drain(core) == {"a": generate(MODEL, prompt, 9)}


def test_the_cache_is_not_reset_while_somebody_waits_with_copies_on_the_host():
    config = EngineConfig(block_size=4, num_blocks=6, preemption_mode="swap", enable_prefix_caching=False)
    core = EngineCore(MODEL, config)
    for name in ("a", "b"):
        core.add_request(name, [5, 6, 7, 8, 9, 10, ord(name)], SamplingParams(max_tokens=12))
    for _ in range(50):
        if core.scheduler.requests["b"].swapped_out:
            break
        core.step()
    core.abort_request("a")
    assert core.scheduler.requests["b"].swapped_out, "the pool was too large for this test"
    assert core.blocks.num_free == core.blocks.num_blocks and core.reset_prefix_cache() is False
    core.abort_request("b")
    assert core.reset_prefix_cache() is True
