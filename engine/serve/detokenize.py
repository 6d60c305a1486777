"""From a stream of tokens to a stream of text, without broken characters and without lost or doubled spaces."""

CONTEXT = 8  # tokens that stay in the window before it is cut
BROKEN = "\ufffd"  # what decoders put in place of bytes that are no character (yet)


class Detokenizer:
    """Turns the output tokens of one request into text, piece by piece.

    All pieces and `finish()`, joined, are what decoding prompt and output together adds to the text of the prompt.
    Tokens cannot be decoded one by one: a character may be spread over several, and some decoders drop a space at the
    beginning of a text. So a window of the last tokens is decoded each time, and the part that is new is returned. The
    end of it is held back while its last bytes are no character.

    Source: the incremental decoding of text-generation-inference and vLLM.
    """

    def __init__(self, tokenizer, prompt_token_ids=(), skip_special_tokens: bool = True):
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._window = list(prompt_token_ids)
        self._sent = len(self._decode(self._window).rstrip(BROKEN))  # characters of the window's text
        self._cut()

    def add(self, token_ids) -> str:
        """The text that these tokens complete; "" if they complete none."""
        self._window += token_ids
        text = self._decode(self._window)
        complete = len(text.rstrip(BROKEN))
        piece = text[self._sent : complete]
        self._sent = max(self._sent, complete)
        self._cut()
        return piece

    def finish(self) -> str:
        """What was held back: bytes that turned out to be no character."""
        piece = self._decode(self._window)[self._sent :]
        self._sent += len(piece)
        return piece

    def _decode(self, token_ids) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)

    def _cut(self) -> None:
        """Forget old tokens where that cannot change what comes: the rest begins and ends with whole characters."""
        if len(self._window) <= 4 * CONTEXT:
            return
        text, rest = self._decode(self._window), self._decode(self._window[-CONTEXT:])
        # The rest may lack a space at its own beginning, never more.
        if rest and BROKEN not in rest and text.endswith(rest) and self._sent == len(text):
            self._window, self._sent = self._window[-CONTEXT:], len(rest)
