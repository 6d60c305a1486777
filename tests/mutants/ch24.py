"""Wrong answers of chapter 24."""

from tests.mutants import mutant

ADMIT = "ContinuousBatchingEngine.admit"
PREFILL = "ContinuousBatchingEngine.prefill_chunk"
DECODE = "ContinuousBatchingEngine.decode"
STEP = "ContinuousBatchingEngine.step"

mutant(
    ADMIT,
    "self.waiting.popleft()",
    "self.waiting.pop()",
    caught_by="test_admission_is_first_come_first_served",
    believes="any end of the queue will do",
    name="last-come-first-served",
)
mutant(
    ADMIT,
    "                admitted.append(request)\n",
    "                return [request]\n",
    caught_by="test_admission_is_first_come_first_served",
    believes="one admission a step is enough",
    name="one-a-step",
)
mutant(
    ADMIT,
    "        admitted = []\n",
    "        admitted = []\n"
    "        if any(self.slots):\n"
    "            return admitted\n",
    caught_by="test_admission_fills_holes_beside_running_requests",
    believes="the next batch starts when this one is done",
    name="static-batching",
)
mutant(
    ADMIT,
    "request.slot = slot",
    "request.slot = len(admitted)",
    caught_by="test_a_request_and_its_slot_know_each_other",
    believes="the n-th admitted request is in slot n",
    name="counts-instead-of-slot",
)
mutant(
    ADMIT,
    "if owner is None and self.waiting:",
    "if self.waiting:",
    caught_by="test_admission_fills_holes_beside_running_requests",
    believes="as many requests run as there are slots, so every slot can be written",
    name="displaces",
)
mutant(
    ADMIT,
    "self.waiting.popleft()",
    "self.waiting[0]",
    caught_by="test_admission_is_first_come_first_served",
    believes="looking at the front of the queue takes it out",
    name="stays-in-the-queue",
)
mutant(
    ADMIT,
    "                request.slot = slot\n",
    "                request.slot = slot\n"
    "                self.cache.v_cache[:, slot] = 0\n",
    caught_by="test_admission_computes_and_clears_nothing",
    believes="a new owner needs a clean row",
    name="cleans-the-row",
)

mutant(
    PREFILL,
    "torch.arange(start, end, device=self.device)",
    "torch.arange(len(chunk), device=self.device)",
    caught_by="test_chunks_cover_the_prompt_once",
    believes="positions count from the start of the chunk",
    name="positions-restart",
)
mutant(
    PREFILL,
    "hidden_states[:, -1]",
    "hidden_states[:, 0]",
    caught_by="test_chunks_cover_the_prompt_once",
    believes="the logits of a prompt are its first row's",
    name="first-row",
)
mutant(
    PREFILL,
    "if end == len(request.prompt_token_ids):",
    "if end > 0:",
    caught_by="test_chunks_cover_the_prompt_once",
    believes="every chunk ends with a token",
    name="token-after-every-chunk",
)
mutant(
    PREFILL,
    "request.num_computed = end",
    "request.num_computed = len(chunk)",
    caught_by="test_chunks_cover_the_prompt_once",
    believes="num_computed is the length of the last chunk",
    name="counts-the-chunk-only",
)
mutant(
    PREFILL,
    "        end = start + len(chunk)\n",
    "        end = start + len(chunk)\n"
    "        request.num_computed = end\n",
    caught_by="test_a_failed_prefill_can_be_repeated",
    believes="the forward cannot fail, so the count may move first",
    name="counts-too-early",
)
mutant(
    PREFILL,
    "self.cache.view([request.slot], end)",
    "self.cache.view([0], end)",
    caught_by="test_a_prefill_stays_in_its_row",
    believes="a prefill is a batch of one, so it is in row 0",
    name="always-slot-0",
)
mutant(
    PREFILL,
    "self.cache.view([request.slot], end)",
    "self.cache.view([request.slot], self.slot_len)",
    caught_by="test_chunks_cover_the_prompt_once",
    believes="the mask hides the rest of the row, so reading it is free",
    name="reads-the-whole-row",
)
mutant(
    PREFILL,
    "[start : start + self.chunk_size]",
    "[start:]",
    caught_by="test_chunks_cover_the_prompt_once",
    believes="the first chunk is the prompt",
    name="ignores-chunk-size",
)
mutant(
    PREFILL,
    "self.pick_tokens([request], hidden_states[:, -1])[0]",
    "self.pick_tokens([request] * len(chunk), hidden_states[0])[-1]",
    caught_by="test_only_the_last_prompt_row_reaches_the_lm_head",
    believes="every row needs logits",
    name="all-rows-through-the-head",
)
mutant(
    PREFILL,
    "if end == len(request.prompt_token_ids):",
    "if len(chunk) < self.chunk_size:",
    caught_by="test_chunks_cover_the_prompt_once",
    believes="the last chunk is the one that is not full",
    name="short-chunk-means-done",
)
mutant(
    PREFILL,
    "        request.num_computed = end\n",
    "        request.num_computed = end\n"
    "        request.output_token_ids += [] if token is None else [token]\n",
    caught_by="test_chunks_cover_the_prompt_once",
    believes="who computes a token stores it",
    name="appends-itself",
)

mutant(
    DECODE,
    "r.output_token_ids[-1]",
    "r.output_token_ids[0]",
    caught_by="test_decode_continues_each_request_as_if_alone",
    believes="the input is the token that the prefill gave",
    name="first-output-token",
)
mutant(
    DECODE,
    "[[r.num_computed] for r in requests]",
    "[[r.num_computed + 1] for r in requests]",
    caught_by="test_decode_continues_each_request_as_if_alone",
    believes="num_computed counts the new token already, so its position is the next",
    name="position-one-high",
)
mutant(
    DECODE,
    "[[r.num_computed] for r in requests]",
    "[[r.num_computed - 1] for r in requests]",
    caught_by="test_decode_continues_each_request_as_if_alone",
    believes="the newest token stands at the last computed position",
    name="position-one-low",
)
mutant(
    DECODE,
    "[[r.num_computed] for r in requests]",
    "[[max(x.num_computed for x in requests)] for r in requests]",
    caught_by="test_decode_continues_each_request_as_if_alone",
    believes="a batch has one length, the longest",
    name="one-position-for-all",
)
mutant(
    DECODE,
    "max(r.num_computed for r in requests) + 1",
    "max(r.num_computed for r in requests)",
    caught_by="test_decode_continues_each_request_as_if_alone",
    believes="the keys of a decode are the computed ones",
    name="does-not-see-itself",
)
mutant(
    DECODE,
    "max(r.num_computed for r in requests) + 1",
    "self.slot_len",
    caught_by="test_decode_is_one_forward_over_the_given_rows",
    believes="static rows are read from end to end",
    name="reads-whole-rows",
)
mutant(
    DECODE,
    "        view = self.cache.view([r.slot for r in requests], longest)\n",
    "        if len(requests) > 1:\n"
    "            return [self.decode([r])[0] for r in requests]\n"
    "        view = self.cache.view([r.slot for r in requests], longest)\n",
    caught_by="test_decode_is_one_forward_over_the_given_rows",
    believes="requests of different lengths cannot share a forward",
    name="one-by-one",
)
mutant(
    DECODE,
    "r.num_computed += 1",
    "pass",
    caught_by="test_decode_continues_each_request_as_if_alone",
    believes="appending the token moves num_computed",
    name="never-counts",
)
mutant(
    DECODE,
    "        tokens = self.pick_tokens(requests, hidden_states[:, -1])\n"
    "        for r in requests:\n"
    "            r.num_computed += 1\n",
    "        for r in requests:\n"
    "            r.num_computed += 1\n"
    "        tokens = self.pick_tokens(requests, hidden_states[:, -1])\n",
    caught_by="test_a_failed_decode_can_be_repeated",
    believes="sampling cannot fail, so the count may move before it",
    name="counts-too-early",
)
mutant(
    DECODE,
    "[r.slot for r in requests], longest",
    "sorted(r.slot for r in requests), longest",
    caught_by="test_decode_continues_each_request_as_if_alone",
    believes="row i of the batch is slot i, whatever the order of the requests",
    name="rows-in-slot-order",
)
mutant(
    DECODE,
    "        input_ids = torch.tensor(",
    "        requests = [r for r in self.slots if r is not None]\n"
    "        input_ids = torch.tensor(",
    caught_by="test_decode_is_one_forward_over_the_given_rows",
    believes="a decode covers every slot that is taken",
    name="all-running-rows",
)

mutant(
    STEP,
    "        decoding = [r for r in running if not r.in_prefill]\n"
    "        for request in prefilling:\n"
    "            token = self.prefill_chunk(request)\n"
    "            if token is not None:\n"
    "                self.accept(request, token)\n",
    "        for request in prefilling:\n"
    "            token = self.prefill_chunk(request)\n"
    "            if token is not None:\n"
    "                self.accept(request, token)\n"
    "        decoding = [r for r in self.slots if r is not None and not r.in_prefill]\n",
    caught_by="test_steps_follow_the_schedule",
    believes="whoever is past its prefill by now joins the decode",
    name="two-tokens-in-a-step",
)
mutant(
    STEP,
    "if decoding:",
    "if decoding and not prefilling:",
    caught_by="test_a_long_prompt_does_not_silence_the_others",
    believes="a step is prefill or decode, not both",
    name="prefill-stalls-decode",
)
mutant(
    STEP,
    "for request in prefilling:",
    "for request in prefilling[:1]:",
    caught_by="test_steps_follow_the_schedule",
    believes="only one prompt makes progress in a step",
    name="one-chunk-a-step",
)
mutant(
    STEP,
    "            token = self.prefill_chunk(request)\n",
    "            token = self.prefill_chunk(request)\n"
    "            while token is None:\n"
    "                token = self.prefill_chunk(request)\n",
    caught_by="test_steps_follow_the_schedule",
    believes="a prompt is prefilled to its end before anything else",
    name="whole-prompt-in-a-step",
)
mutant(
    STEP,
    "        for request in prefilling:\n"
    "            token = self.prefill_chunk(request)\n"
    "            if token is not None:\n"
    "                self.accept(request, token)\n"
    "        if decoding:\n"
    "            for request, token in zip(decoding, self.decode(decoding), strict=True):\n"
    "                self.accept(request, token)\n",
    "        new = [(request, self.prefill_chunk(request)) for request in prefilling]\n"
    "        if decoding:\n"
    "            new += zip(decoding, self.decode(decoding), strict=True)\n"
    "        for request, token in new:\n"
    "            if token is not None:\n"
    "                self.accept(request, token)\n",
    caught_by="test_a_step_that_raises_loses_nothing",
    believes="tokens can be accepted when the whole step has worked",
    name="accepts-at-the-end",
)
mutant(
    STEP,
    "updates, self.updates = self.updates, []",
    "updates = list(self.updates)",
    caught_by="test_steps_follow_the_schedule",
    believes="the list of updates belongs to the caller, who empties it",
    name="updates-repeat",
)
mutant(
    STEP,
    "        if running:\n"
    "            self.num_steps += 1\n",
    "        self.num_steps += 1\n",
    caught_by="test_an_idle_step_counts_nothing",
    believes="every call of step is a step",
    name="idle-steps-count",
)
mutant(
    STEP,
    "        self.admit()\n"
    "        running = [r for r in self.slots if r is not None]\n",
    "        running = [r for r in self.slots if r is not None]\n"
    "        self.admit()\n",
    caught_by="test_steps_follow_the_schedule",
    believes="a request that was admitted starts in the next step",
    name="admitted-but-not-run",
)
mutant(
    STEP,
    "self.decode(decoding)",
    "[self.decode([r])[0] for r in decoding]",
    caught_by="test_steps_follow_the_schedule",
    believes="decode takes one request",
    name="a-decode-each",
)
