"""Wrong answers of chapter 31: hash_block."""

from tests.mutants import mutant

WHOLE = """    # repr of such values says both type and value, with delimiters that escape what they enclose.
    text = repr((parent, [index(token) for token in tokens], extra))
    return blake2b(text.encode(), digest_size=32).digest()"""
TEXT = "repr((parent, [index(token) for token in tokens], extra))"
RETURN = "blake2b(text.encode(), digest_size=32).digest()"

mutant(
    "hash_block",
    "repr((parent, [index",
    "repr((None, [index",
    caught_by="test_the_parent_is_part_of_the_name",
    believes="a block's K/V depends on its own tokens only",
    name="no-parent",
)
mutant(
    "hash_block",
    "repr((parent, [index",
    'repr((parent or b"", [index',
    caught_by="test_no_parent_differs_from_an_empty_one",
    believes="no parent is the same as an empty one",
    name="parent-ignored-for-the-first-block",
)
mutant(
    "hash_block",
    "    text = repr((parent, [index(token) for token in tokens], extra))\n",
    "    rest = repr(([index(token) for token in tokens], extra))\n"
    "    text = repr(parent) + rest if parent else rest\n",
    caught_by="test_no_parent_differs_from_an_empty_one",
    believes="the first block has no parent to hash",
    name="parent-left-out-of-the-first-block",
)
mutant(
    "hash_block",
    "repr((parent, [index",
    "repr((parent and parent[:4], [index",
    caught_by="test_the_parent_is_part_of_the_name",
    believes="a few bytes of the parent will do",
    name="short-parent",
)
mutant(
    "hash_block",
    "for token in tokens], extra))",
    "for token in tokens]))",
    caught_by="test_extra_is_part_of_the_name",
    believes="K/V depends on tokens alone",
    name="extra-dropped",
)
mutant(
    "hash_block",
    "for token in tokens], extra))",
    "for token in tokens], extra if parent is None else ()))",
    caught_by="test_extra_is_part_of_the_name",
    believes="the parent already holds the extra keys (a caller may give others)",
    name="extra-in-the-first-block-only",
)
mutant(
    "hash_block",
    RETURN,
    'hash((parent, tuple(tokens), extra)).to_bytes(16, "little", signed=True)',
    caught_by="test_a_name_is_the_same_in_every_process",
    believes="Python's hash is a hash",
    name="pythons-hash",
)
mutant(
    "hash_block",
    RETURN,
    'hash((parent, tuple(tokens), extra)).to_bytes(16, "little", signed=True)',
    caught_by="test_all_bits_of_a_name_are_hash",
    believes="64 bits are plenty, and padding makes them 128",
    name="padded-hash",
)
mutant(
    "hash_block",
    "digest_size=32).digest()",
    "digest_size=8).digest()",
    caught_by="test_a_name_is_at_least_16_bytes_of_hash",
    believes="8 bytes are enough for any cache",
    name="eight-bytes",
)
mutant(
    "hash_block",
    "digest_size=32).digest()",
    "digest_size=8).digest() * 2",
    caught_by="test_all_bits_of_a_name_are_hash",
    believes="16 bytes are 16 bytes",
    name="eight-bytes-twice",
)
mutant(
    "hash_block",
    TEXT,
    '(parent or b"").hex() + "|" + ",".join(map(str, tokens)) + "|" + ",".join(map(str, extra))',
    caught_by="test_values_of_different_types_are_different_keys",
    believes="text of the values joined with commas identifies them",
    name="ambiguous-text",
)
mutant(
    "hash_block",
    TEXT,
    'repr((parent, [index(token) for token in tokens])) + "".join(map(repr, extra))',
    caught_by="test_no_two_extras_share_an_encoding",
    believes="repr of each value is unambiguous, so their concatenation is",
    name="concatenated-reprs",
)
mutant(
    "hash_block",
    WHOLE,
    """    parts = []
    def flatten(value):
        for item in value:
            flatten(item) if type(item) is tuple else parts.append(item)
    flatten(extra)
    return blake2b(repr((parent, list(tokens), parts)).encode(), digest_size=32).digest()""",
    caught_by="test_an_adapter_and_a_salt_of_one_name_differ",
    believes="only the leaves of nested keys matter",
    name="flattened-extra",
)
mutant(
    "hash_block",
    WHOLE,
    """    data = (parent or bytes(32)) + b"".join(t.to_bytes(4, "little") for t in tokens) + repr(extra).encode()
    return blake2b(data, digest_size=32).digest()""",
    caught_by="test_no_parent_differs_from_an_empty_one",
    believes="zeros can stand for no parent",
    name="zero-root",
)
mutant(
    "hash_block",
    WHOLE,
    """    data = (parent or b"") + b"".join(token.to_bytes(4, "little") for token in tokens) + repr(extra).encode()
    return blake2b(data, digest_size=32).digest()""",
    caught_by="test_a_parent_is_not_mistaken_for_tokens",
    believes="bytes one after the other are an encoding",
    name="parent-runs-into-tokens",
)
mutant(
    "hash_block",
    "[index(token) for token in tokens]",
    "bytes(token & 255 for token in tokens)",
    caught_by="test_tokens_are_part_of_the_name_in_their_order",
    believes="a token is a byte",
    name="tokens-as-bytes",
)
mutant(
    "hash_block",
    "[index(token) for token in tokens]",
    "sorted(tokens)",
    caught_by="test_tokens_are_part_of_the_name_in_their_order",
    believes="the order of tokens does not matter",
    name="sorted-tokens",
)
mutant(
    "hash_block",
    "[index(token) for token in tokens]",
    "tokens",
    caught_by="test_a_tuple_of_tokens_is_the_same_as_a_list",
    believes="callers always pass a list",
    name="type-of-the-sequence",
)
mutant(
    "hash_block",
    "[index(token) for token in tokens]",
    '"".join(map(str, tokens))',
    caught_by="test_neighbouring_tokens_do_not_run_together",
    believes="digits one after the other identify the tokens",
    name="digits-run-together",
)
mutant(
    "hash_block",
    TEXT,
    "repr((parent, [index(token) for token in tokens], sorted(extra, key=repr)))",
    caught_by="test_extra_is_part_of_the_name",
    believes="extra keys are a set",
    name="sorted-extra",
)
mutant(
    "hash_block",
    WHOLE,
    """    def plain(value):
        return "(" + ",".join(map(plain, value)) + ")" if type(value) is tuple else f"{type(value).__name__}:{value}"

    text = f"{parent!r}|{[index(token) for token in tokens]}|{plain(extra)}"
    return blake2b(text.encode(), digest_size=32).digest()""",
    caught_by="test_no_text_inside_a_value_can_pass_for_the_end_of_it",
    believes="a type name and a comma keep two values apart",
    name="type-tags-without-escapes",
)
