"""The comparison with transformers: it runs, prints what it says, and prints no speed for a wrong token."""

import json
import os

import pytest

from experiments import beside_transformers

SMALL = ["--model", "random", "--width", "128", "--requests", "2", "--repeat", "1"]


@pytest.fixture(autouse=True)
def same_code(monkeypatch):
    monkeypatch.setenv("IMPL", os.environ.get("IMPL", "engine"))  # main has a default of its own


def test_every_engine_gives_our_tokens_and_has_a_line(capsys):
    assert beside_transformers.main(SMALL) == 0
    out, err = capsys.readouterr()
    lines = {line["engine"]: line for line in map(json.loads, out.splitlines())}
    assert [*lines] == ["core", "padded, 8", "padded, all", "continuous", "one by one"], err
    assert len({line["output_tokens"] for line in lines.values()}) == 1
    for line in lines.values():
        assert line["output_tokens"] > 0 and line["tok_s"] > 0
        assert line["ratio"] == pytest.approx(line["tok_s"] / lines["padded, 8"]["tok_s"], rel=0.05)
    assert "padded, all" in err


@pytest.mark.parametrize(("engine", "left_out"), [("run_padded", "continuous"), ("run_continuous", "padded, all")])
def test_one_wrong_token_stops_the_run(engine, left_out, monkeypatch, capsys):
    right = getattr(beside_transformers, engine)

    def wrong(*given):
        outputs, seconds = right(*given)
        outputs[-1][-1] ^= 1
        return outputs, seconds

    monkeypatch.setattr(beside_transformers, engine, wrong)
    assert beside_transformers.main([*SMALL, "--skip", left_out, "--skip", "one by one"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("WRONG OUTPUT, so no speed is printed. ") and "request 1 differs" in err


def test_an_engine_that_cannot_run_is_named_and_left_out(monkeypatch, capsys):
    def broken(*given):
        raise beside_transformers.CannotRunError("no such\ndevice")

    monkeypatch.setattr(beside_transformers, "run_continuous", broken)
    assert beside_transformers.main([*SMALL, "--json", "--skip", "padded, all", "--skip", "one by one"]) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line)["engine"] for line in out.splitlines()] == ["core", "padded, 8"]
    assert err == "continuous does not run here: no such device\n"


def test_a_padded_row_is_cut_to_what_was_asked_for():
    assert beside_transformers.cut([5, 6, 7, 8], 3, []) == [5, 6, 7]
    assert beside_transformers.cut([5, 9, 7, 9], 4, [9, 2]) == [5, 9]
    assert beside_transformers.cut([5, 6, 7, 9], 3, [9]) == [5, 6, 7]
