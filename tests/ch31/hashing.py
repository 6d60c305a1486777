"""hash_block: one name for each (parent, tokens, extra), the same in every process."""

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.serve import blocks
from engine.serve.blocks import hash_block
from tests.differences import shorten
from tests.grading import expect, expect_equal, grades, rng
from tests.sections import ROOT

HASH = "31: Hash chains"
PARENT = bytes(range(32))
LEAVES = [
    None, True, False, 0, 1, -1, 2, 12, 21, 255, 256, 2**63, -(2**63), 10**40, 1.0, -1.0, 0.5, 1e300,
    "", "1", "2", "12", "a", "b", "ab", "ba", "é", "None", "True", "1.0", "b'1'", ",", ", ", "a,b", "'", '"', "\\",
    "\\'", "', '", "a', 'b", "(", ")", "()", "('a',)", "\0", "a\0b", "\x01", "|", ":", "1:a", "\n",
    b"", b"1", b"2", b"12", b"a", b"ab", b"None", b"\0", b"\x01", b"\x01\0\0\0\0\0\0\0", b"'", b", ",
]  # fmt: skip


def typed(value):
    """A key that is equal for equal values of equal types only (in Python 1 == True == 1.0)."""
    return (type(value).__name__, tuple(map(typed, value)) if isinstance(value, tuple) else value)


def triple_key(triple):
    parent, tokens, extra = triple
    return typed(parent), tuple(tokens), typed(extra)


def shown(triple):
    parent, tokens, extra = triple
    name = f"{parent[:2].hex()}… ({len(parent)} bytes)" if parent and len(parent) > 8 else repr(parent)
    text = f"[{tokens[0]}, {tokens[1]}, … {len(tokens)} tokens]" if len(tokens) > 6 else repr(tokens)
    return f"hash_block({name}, {text}, {extra!r})"


def expect_all_different(triples, hint):
    """No two different triples may have one name."""
    seen = {}
    for triple in triples:
        other = seen.setdefault(hash_block(*triple), triple)
        different = triple_key(other) != triple_key(triple)
        expect(not different, f"{shown(other)} and {shown(triple)} give the same name", hint, see=HASH)


def some_tokens(salt, n=16):
    random = rng(salt)
    return [random.randrange(1, 150_000) for _ in range(n)]


@grades(hash_block)
def test_a_name_is_at_least_16_bytes_of_hash():
    tokens = some_tokens("name")
    got = hash_block(None, tokens)
    expect(isinstance(got, bytes), f"hash_block(None, {shorten(tokens)}): expected bytes, got {shorten(got)}", see=HASH)
    expect(len(got) >= 16, f"hash_block: expected at least 16 bytes, got {len(got)}", "128 bits at least", see=HASH)
    expect_equal(hash_block(None, tokens), got, what="hash_block of the same block, called again", see=HASH)


@grades(hash_block)
def test_all_bits_of_a_name_are_hash():
    """Padding, repetition, a short or a linear checksum leave fewer than 128 independent bits over many names."""
    random = rng("bits")
    names = [hash_block(None, [random.randrange(150_000) for _ in range(4)]) for _ in range(320)]
    basis = {}
    for name in names[1:]:
        bits = int.from_bytes(name, "little") ^ int.from_bytes(names[0], "little")
        while bits and bits.bit_length() in basis:
            bits ^= basis[bits.bit_length()]
        if bits:
            basis[bits.bit_length()] = bits
    hint = "blake2b(data, digest_size=16 or more).digest(), whole and nothing else"
    expect(len(basis) >= 128, f"hash_block: only {len(basis)} bits of its value are independent, not 128", hint, HASH)


@grades(hash_block)
def test_the_parent_is_part_of_the_name():
    tokens, random = some_tokens("parent"), rng("parents")
    parents = [None, *(random.randbytes(32) for _ in range(20))]
    parents += [parents[-1][:-1] + bytes([parents[-1][-1] ^ 1]), parents[-2][::-1]]
    hint = "the same tokens after another beginning have other K/V: the whole parent goes into the hash"
    expect_all_different([(parent, tokens, ()) for parent in parents], hint)


@grades(hash_block)
def test_a_chain_remembers_its_first_block():
    random = rng("chain")
    shared = [[random.randrange(1000) for _ in range(4)] for _ in range(5)]
    names = []
    for first in (shared[0], [*shared[0][:-1], shared[0][-1] + 1]):
        name = None
        for tokens in (first, *shared[1:]):
            name = hash_block(name, tokens)
        names.append(name)
    message = "hash_block: two chains that differ in their first block have the same name five blocks later"
    expect(names[0] != names[1], message, "is the parent part of every hash?", see=HASH)


@grades(hash_block)
def test_no_parent_differs_from_an_empty_one():
    tokens = some_tokens("no parent")
    parents = [None, b"", b"\0", b"None", bytes(16), bytes(32)]
    hint = "for the first block the parent must not just be left out: `no parent` needs an encoding of its own"
    expect_all_different([(parent, tokens, extra) for extra in ((), ("a",)) for parent in parents], hint)


@grades(hash_block)
def test_a_parent_is_not_mistaken_for_tokens():
    """Bytes of the parent that look like the block's own tokens, in the usual widths and in text."""
    tokens = some_tokens("parent or tokens")
    triples = [(None, tokens, ())]
    for cut in (1, 2, 4, 8):
        head, tail = tokens[:cut], tokens[cut:]
        for width, order in ((4, "little"), (8, "little"), (4, "big"), (8, "big")):
            triples.append((b"".join(t.to_bytes(width, order) for t in head), tail, ()))
        for text in (str(head), str(tuple(head)), ",".join(map(str, head)), " ".join(map(str, head))):
            triples += [(text.encode(), tail, ()), ((text + ",").encode(), tail, ())]
    expect_all_different(triples, "where the parent ends and the tokens begin must be unambiguous: write its length")


@grades(hash_block)
def test_tokens_are_part_of_the_name_in_their_order():
    random = rng("tokens")
    base = [random.randrange(150_000) for _ in range(16)]
    lists = [base, base[::-1], base[1:] + base[:1], base[:-1], [*base, 0], [0, *base], [0] * 16, [0] * 15, []]
    lists += [base[:i] + [base[i] ^ (1 << random.randrange(18))] + base[i + 1 :] for i in range(16)]
    lists += [[base[0] + step, *base[1:]] for step in (256, 65_536, 2**24, 2**31 - 2**18)]
    expect_all_different([(PARENT, t, ()) for t in lists], "every token counts, all of its bits, and where it stands")


@grades(hash_block)
def test_neighbouring_tokens_do_not_run_together():
    lists = [[1, 23], [12, 3], [123], [1, 2, 3], [2, 13], [21, 3], [0, 1, 23], [1, 0, 23], [256 + 1, 23], [1, 1, 23]]
    expect_all_different([(None, t, ()) for t in lists], "write tokens with a separator or in a fixed width")


@grades(hash_block)
def test_a_tuple_of_tokens_is_the_same_as_a_list():
    tokens = some_tokens("tuple")
    for extra in ((), ("tenant", 7)):
        expect_equal(
            hash_block(PARENT, tuple(tokens), extra), hash_block(PARENT, tokens, extra),
            what=f"hash_block of a tuple of tokens, against a list of them, extra {extra!r}", see=HASH,
        )  # fmt: skip


@grades(hash_block)
def test_extra_is_part_of_the_name():
    """A tenant must not read another's cache, nor an adapter another's K/V; in any block of the chain."""
    tokens = some_tokens("extra")
    hint = "is extra part of the hash, in the first block and in later ones?"
    for parent in (None, PARENT):
        extras = [(), ("tenant 1",), ("tenant 2",), ("tenant 1", "adapter"), ("adapter", "tenant 1"), (7,), (8,)]
        expect_all_different([(parent, tokens, extra) for extra in extras], hint)


@grades(hash_block)
def test_absent_extras_are_the_empty_tuple():
    tokens = some_tokens("absent")
    for parent in (None, PARENT):
        what = "hash_block(parent, tokens, ()), against hash_block(parent, tokens)"
        expect_equal(hash_block(parent, tokens, ()), hash_block(parent, tokens), what=what, see=HASH)
    extras = [(), (None,), ("",), (b"",), ((),), (((),),), (0,), (False,), (None, None), ((), ())]
    expect_all_different([(PARENT, tokens, extra) for extra in extras], "nothing, None and empty are different keys")


@grades(hash_block)
def test_values_of_different_types_are_different_keys():
    tokens = some_tokens("types")
    groups = [(1, True, "1", b"1", 1.0), (0, False, "0", b"0", "", None), (12, "12", b"12", (12,), (1, 2), "1, 2")]
    groups += [(None, "None", b"None", ()), (True, "True", b"True"), (1.5, "1.5", b"1.5"), (-1, "-1", -1.0, 2**64 - 1)]
    for values in groups:
        expect_all_different([(None, tokens, (value,)) for value in values], "an encoding says the type, too")


@grades(hash_block)
def test_an_adapter_and_a_salt_of_one_name_differ():
    tokens = some_tokens("adapter")
    extras = [(("adapter", "a"),), (("salt", "a"),), ("adapter", "a"), (None, "a"), ("a", None), (("adapter", "a"), ())]
    expect_all_different([(None, tokens, extra) for extra in extras], "keep the structure of extra in the encoding")


@grades(hash_block)
def test_no_two_extras_share_an_encoding():
    """Delimiters inside values, values that join up, tuples within tuples: every pair of about 50 nasty values."""
    extras = [(), *((a,) for a in LEAVES), *((a, b) for a in LEAVES for b in LEAVES)]
    extras += [extra for a in LEAVES for extra in (((a,),), ((), a), ((a,), a), (a, (a,)), ((a, a),))]
    extras += [("a", "b", "ab"), (("a", "b"), "ab"), ("a", ("b", "ab")), (("a", ("b",)), "ab"), ("ab", "ab"), ("abab",)]
    hint = "the encoding must say where each value ends, whatever characters are in it: ambiguous encodings collide"
    expect_all_different([(None, [5, 6], extra) for extra in extras], hint)


@grades(hash_block)
def test_no_text_inside_a_value_can_pass_for_the_end_of_it():
    """Whatever an encoding may put between two values, written into one value."""
    tags = ("", "s", "str", "s:", "str:", "1:", "s1:", "<str>", "'", '"', "b'")
    glues = [separator + tag for separator in (",", ", ", "|", ";", " ", "\0", "),(", "', ", '", ') for tag in tags]
    pairs = [extra for glue in glues for extra in ((f"a{glue}b",), ((f"a{glue}b",),))]
    hint = "a value may hold your own separators and type names: write its length, or escape what it holds"
    expect_all_different([(None, [5, 6], extra) for extra in (("a", "b"), (("a", "b"),), *dict.fromkeys(pairs))], hint)


@grades(hash_block)
def test_tokens_are_not_mistaken_for_extra():
    triples = []
    for parent in (None, PARENT):
        for cut in range(4):
            tokens = [7, 11, 13]
            head, tail = tokens[:cut], tuple(tokens[cut:])
            triples += [(parent, head, tail), (parent, head, (tail,)), (parent, head, tuple(map(str, tail)))]
            triples.append((parent, head, tuple(t.to_bytes(8, "little") for t in tail)))
    expect_all_different(triples, "where the tokens end and extra begins must be unambiguous")


values = st.sampled_from(LEAVES) | st.text(max_size=4) | st.binary(max_size=4) | st.integers()
nested = values | st.tuples(values) | st.tuples(values, values) | st.tuples(st.tuples(values), values) | st.just(())
triples = st.tuples(
    st.none() | st.binary(max_size=40),
    st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 30), max_size=6),
    st.lists(nested, max_size=4).map(tuple),
)


@st.composite
def neighbours(draw):
    """A triple and another that an ambiguous encoding is likely to confuse with it."""
    first = parent, tokens, extra = draw(triples)
    value = extra[-1] if extra else None
    near = [
        (parent or b"", tokens, extra), (parent or None, tokens, extra), ((parent or b"") + b"\0", tokens, extra),
        (parent, [0, *tokens], extra), (parent, tokens[:-1], (*tokens[-1:], *extra)), (parent, tokens, (extra,)),
        (parent, [int("".join(map(str, tokens[:2])) or 0) % 2**31, *tokens[2:]], extra),
        (parent, tokens, (*extra, None)), (parent, tokens, (*extra, ())), (parent, tokens, (*extra[:-1], (value,))),
        (parent, tokens, (*extra[:-1], str(value))), (parent, tokens, (*extra[:-1], repr(value))),
        (parent, tokens, (*extra[:-1], str(value).encode(errors="replace"))), (parent, tokens, tuple(map(str, extra))),
        (parent, tokens, (", ".join(map(str, extra)),)), (parent, tokens, ("".join(map(str, extra)),)),
        (parent, tokens, (str(extra),)), (parent, list(tokens), tuple(extra)), None,
    ]  # fmt: skip
    return first, draw(st.sampled_from(near)) or draw(triples)


@grades(hash_block)
@settings(max_examples=150)
@given(neighbours())
def test_names_are_equal_exactly_for_equal_triples(pair):
    one, other = pair
    same = triple_key(one) == triple_key(other)
    expect(
        (hash_block(*one) == hash_block(*other)) == same,
        f"{shown(one)} and {shown(other)}: expected {'one name' if same else 'two names'}",
        "is the encoding that is hashed ambiguous?" if not same else "equal triples have equal names",
        see=HASH,
    )


IN_ANOTHER_PROCESS = """
import sys, types
name, path = "engine.serve.blocks", sys.argv[1]
module = sys.modules[name] = types.ModuleType(name)
module.__file__ = path
exec(compile(sys.stdin.read(), path, "exec"), module.__dict__)
for parent in (None, b"parent of sixteen"):
    for extra in ((), ("tenant", 1, (b"x", None))):
        print(module.hash_block(parent, [3, 1, 151_000], extra).hex())
print("torch" in sys.modules)
"""


@pytest.fixture(scope="module")
def names_elsewhere():
    """The same names from new interpreters, by PYTHONHASHSEED. They run the module's text as it was imported here."""
    text = blocks.__loader__.get_source(blocks.__name__)
    running = {}
    for seed in ("0", "1", "4242"):
        command = [sys.executable, "-c", IN_ANOTHER_PROCESS, blocks.__file__]
        running[seed] = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
    answers = {seed: process.communicate(text, timeout=30) for seed, process in running.items()}
    return {seed: (out.split(), err.strip().splitlines()[-1:]) for seed, (out, err) in answers.items()}


@grades(hash_block)
def test_a_name_is_the_same_in_every_process(names_elsewhere):
    here = [
        hash_block(parent, [3, 1, 151_000], extra).hex()
        for parent in (None, b"parent of sixteen")
        for extra in ((), ("tenant", 1, (b"x", None)))
    ]
    hint = "Python's hash() of strings and bytes, and id(), change from process to process"
    for seed, (lines, error) in names_elsewhere.items():
        where = f"in a new interpreter with PYTHONHASHSEED={seed}"
        expect(len(lines) == 5, f"hash_block fails {where}: {' '.join(error)}", see=HASH)
        same = lines[:4] == here
        expect(same, f"hash_block gives another value {where} than here for the same block", hint, HASH)
