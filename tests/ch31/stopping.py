"""When an output token ends its request. EngineCore.check_stop."""

import pytest

from engine.serve.engine import EngineCore
from engine.serve.request import Request, SamplingParams, Status
from tests.ch31.fake_pool import LOOP, fake_core
from tests.ch31.harness import Harness
from tests.grading import expect_equal, grades, rng

check_stop = EngineCore.check_stop
STOPPED, LENGTH = Status.FINISHED_STOPPED, Status.FINISHED_LENGTH
EOS, STOP, OTHER = 7, 8, 9


def verdict(output, index=-1, eos=EOS, prompt=(1, 2), max_positions=4096, **params):
    """(status, stop_reason) of a request with this output."""
    params = SamplingParams(**{"max_tokens": 50, **params})
    request = Request("r", list(prompt), params, eos)
    for token in output:
        request.append(token)
    status = fake_core(max_positions=max_positions).check_stop(request, index)
    return status, request.stop_reason


def expect_verdict(got, status, reason, what, hint=None):
    shown = ["goes on" if s is None else getattr(s, "value", s) for s in (got[0], status)]
    expect_equal(shown[0], shown[1], f"check_stop, {what}", hint, LOOP)
    expect_equal(got[1], reason, f"stop_reason, {what}", hint, LOOP)


@grades(check_stop)
@pytest.mark.parametrize("eos", [EOS, (30, EOS), (EOS,)])
def test_an_end_of_sequence_stops(eos):
    hint = "eos_token_id may be one id or several"
    expect_verdict(verdict([OTHER, EOS], eos=eos), STOPPED, None, f"the newest token is EOS {EOS} of {eos}", hint)
    expect_verdict(verdict([OTHER, OTHER], eos=eos), None, None, f"the newest token is {OTHER}, EOS is {eos}")


@grades(check_stop)
def test_without_an_end_of_sequence_only_length_and_stop_ids_end():
    expect_verdict(verdict([OTHER, EOS], eos=None), None, None, "no EOS is set", "eos_token_id None never matches")
    expect_verdict(verdict([OTHER, 0], eos=None), None, None, "no EOS is set and the token is 0")
    expect_verdict(verdict([OTHER, STOP], eos=None, stop_token_ids=(STOP,)), STOPPED, STOP, "no EOS is set, a stop id")


@grades(check_stop)
def test_token_zero_can_stop_too():
    expect_verdict(verdict([OTHER, 0], eos=0), STOPPED, None, "EOS is 0")
    got = verdict([OTHER, 0], stop_token_ids=(0,))
    expect_verdict(got, STOPPED, 0, "the stop id is 0", "0 is a token like any other")


@grades(check_stop)
def test_ignore_eos_goes_on_but_stop_ids_still_end():
    expect_verdict(verdict([EOS], ignore_eos=True), None, None, "EOS with ignore_eos")
    got = verdict([STOP], ignore_eos=True, stop_token_ids=(STOP,))
    expect_verdict(got, STOPPED, STOP, "a stop id with ignore_eos", "ignore_eos is about EOS alone")
    got = verdict([EOS], ignore_eos=True, stop_token_ids=(EOS,))
    expect_verdict(got, STOPPED, EOS, "an id that is EOS and stop id, with ignore_eos", "then it is a stop id")


@grades(check_stop)
def test_a_stop_id_is_named_as_the_reason():
    ids = tuple(rng("stop ids").sample(range(10, 60), 3))
    for token in ids:
        expect_verdict(verdict([OTHER, token], stop_token_ids=ids), STOPPED, token, f"token {token}, stop ids {ids}")
    got = verdict([OTHER, EOS], stop_token_ids=(EOS, STOP))
    expect_verdict(got, STOPPED, None, "an id that is EOS and stop id", "EOS comes first, and gives no stop_reason")


@grades(check_stop)
@pytest.mark.parametrize("token, reason", [(EOS, None), (STOP, STOP), (STOP + 2, STOP + 2)])
def test_nothing_stops_before_min_tokens(token, reason):
    stops = (STOP, STOP + 2)
    for length in range(1, 5):
        got = verdict([OTHER] * (length - 1) + [token], min_tokens=3, stop_token_ids=stops)
        expected = (None, None) if length < 3 else (STOPPED, reason)
        hint = "the token itself counts, and every stop id waits for min_tokens"
        expect_verdict(got, *expected, f"token {length} is {token}, min_tokens 3", hint)


@grades(check_stop)
def test_max_tokens_is_reached_exactly():
    for length in (1, 4, 5):
        status = LENGTH if length == 5 else None
        expect_verdict(verdict([OTHER] * length, max_tokens=5), status, None, f"{length} output tokens, max_tokens 5")
    expect_verdict(verdict([OTHER], max_tokens=1), LENGTH, None, "one output token, max_tokens 1")


@grades(check_stop)
def test_the_model_length_ends_a_request():
    for length in (3, 4, 5):
        got = verdict([OTHER] * length, prompt=[1] * 6, max_positions=10)
        status = LENGTH if length >= 4 else None
        hint = "prompt and output together reach max_model_len"
        expect_verdict(got, status, None, f"prompt of 6, {length} output tokens, max_model_len 10", hint)


@grades(check_stop)
def test_a_stop_on_the_last_token_is_a_stop():
    got = verdict([OTHER, STOP], max_tokens=2, stop_token_ids=(STOP,))
    expect_verdict(got, STOPPED, STOP, "a stop id as token 2 of max_tokens 2", "stopping is asked before length")
    expect_verdict(verdict([OTHER, EOS], max_tokens=2), STOPPED, None, "EOS as token 2 of max_tokens 2")
    got = verdict([EOS, EOS], max_tokens=2, min_tokens=2)
    expect_verdict(got, STOPPED, None, "EOS as token 2 of max_tokens 2 and min_tokens 2")


@grades(check_stop)
def test_tokens_of_the_prompt_never_stop_anything():
    got = verdict([OTHER], prompt=[EOS, STOP, EOS], stop_token_ids=(STOP,))
    expect_verdict(got, None, None, "a prompt of EOS and stop ids, the output is another token")


@grades(check_stop)
def test_any_output_token_can_be_asked_about():
    output, params = [OTHER, STOP, OTHER, EOS, OTHER], {"stop_token_ids": (STOP,), "max_tokens": 5}
    expected = [None, STOPPED, None, STOPPED, LENGTH]
    for place, status in enumerate(expected):
        for index in (place, place - len(output)):
            reason = STOP if place == 1 else None
            hint = "as if the output ended with that token"
            expect_verdict(verdict(output, index, **params), status, reason, f"index {index} of 5 output tokens", hint)


@grades(check_stop)
def test_min_tokens_counts_up_to_the_token_that_is_asked_about():
    for index in (1, -4):
        got = verdict([OTHER, STOP, OTHER, OTHER, OTHER], index, min_tokens=3, stop_token_ids=(STOP,))
        expect_verdict(got, None, None, f"index {index} is a stop id as token 2, min_tokens 3, 5 tokens are there")


@grades(check_stop)
def test_a_request_that_goes_on_is_left_as_it_is():
    request = Request("r", [1, 2], SamplingParams(stop_token_ids=(STOP,)), EOS)
    request.append(OTHER)

    def state():
        return request.status.name, list(request.token_ids), request.stop_reason, request.num_computed_tokens

    before = state()
    fake_core().check_stop(request)
    what = "(status, token_ids, stop_reason, num_computed_tokens)[{i}]"
    expect_equal(state(), before, what, "`step` ends a request; check_stop only says whether", LOOP)


@grades(check_stop)
def test_min_tokens_and_stop_ids_over_whole_outputs():
    """Random ids, so that stop ids and EOS come up everywhere; the oracle cuts the whole text at once."""
    random = rng("whole outputs")
    harness = Harness(eos_token_id=(3, 11), num_blocks=200, max_num_batched_tokens=200)
    for i in range(40):
        most = random.randint(1, 30)
        harness.add(
            str(i),
            [random.randrange(61) for _ in range(random.randint(1, 9))],
            most,
            min_tokens=random.randint(0, most),
            ignore_eos=random.random() < 0.3,
            stop_token_ids=random.sample(range(61), random.randint(0, 9)),
        )
    harness.drain()
