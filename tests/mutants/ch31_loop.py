"""Wrong answers of chapter 31: EngineCore.check_stop and EngineCore.step."""

from tests.mutants import mutant

CHECK, STEP = "EngineCore.check_stop", "EngineCore.step"
IS_EOS = "is_eos = token in eos if isinstance(eos, (tuple, list, set, frozenset)) else token == eos"

mutant(
    CHECK,
    "if length >= params.min_tokens:",
    "if length > params.min_tokens:",
    caught_by="test_nothing_stops_before_min_tokens",
    believes="min_tokens have to come before the token that stops",
    name="min-tokens-off-by-one",
)
mutant(
    CHECK,
    "            if token in params.stop_token_ids:\n"
    "                request.stop_reason = token\n"
    "                return Status.FINISHED_STOPPED\n",
    "        if token in params.stop_token_ids:\n"
    "            request.stop_reason = token\n"
    "            return Status.FINISHED_STOPPED\n",
    caught_by="test_nothing_stops_before_min_tokens",
    believes="min_tokens is about EOS alone",
    name="stop-ids-before-min-tokens",
)
mutant(
    CHECK,
    IS_EOS,
    "is_eos = token == eos",
    caught_by="test_an_end_of_sequence_stops",
    believes="a model has one end of sequence",
    name="one-eos-only",
)
mutant(
    CHECK,
    IS_EOS,
    "is_eos = token in eos if isinstance(eos, (tuple, list, set, frozenset)) else token == (eos or 0)",
    caught_by="test_without_an_end_of_sequence_only_length_and_stop_ids_end",
    believes="no end of sequence is the same as id 0",
    name="none-is-zero",
)
mutant(
    CHECK,
    "if is_eos and not params.ignore_eos:",
    "if is_eos:",
    caught_by="test_ignore_eos_goes_on_but_stop_ids_still_end",
    believes="the end is the end",
    name="ignores-ignore-eos",
)
mutant(
    CHECK,
    "            if token in params.stop_token_ids:\n",
    "            if token in params.stop_token_ids and not params.ignore_eos:\n",
    caught_by="test_ignore_eos_goes_on_but_stop_ids_still_end",
    believes="ignore_eos means that nothing but length stops",
    name="ignore-eos-ignores-all",
)
mutant(
    CHECK,
    "                request.stop_reason = token\n",
    "",
    caught_by="test_a_stop_id_is_named_as_the_reason",
    believes="the last token says why it stopped",
    name="no-reason",
)
mutant(
    CHECK,
    "            if is_eos and not params.ignore_eos:\n                return Status.FINISHED_STOPPED\n",
    "            if is_eos and not params.ignore_eos:\n                request.stop_reason = token\n"
    "                return Status.FINISHED_STOPPED\n",
    caught_by="test_an_end_of_sequence_stops",
    believes="EOS is a reason like any other",
    name="eos-as-reason",
)
mutant(
    CHECK,
    "if length >= params.max_tokens or",
    "if length > params.max_tokens or",
    caught_by="test_max_tokens_is_reached_exactly",
    believes="max_tokens may be reached but not passed, so one more is asked for",
    name="one-token-too-many",
)
mutant(
    CHECK,
    " or request.num_prompt_tokens + length >= self.max_model_len",
    "",
    caught_by="test_the_model_length_ends_a_request",
    believes="add_request has seen to the length",
    name="no-model-length",
)
mutant(
    CHECK,
    "request.num_prompt_tokens + length >= self.max_model_len",
    "length >= self.max_model_len",
    caught_by="test_the_model_length_ends_a_request",
    believes="max_model_len is about the output",
    name="model-length-without-prompt",
)
mutant(
    CHECK,
    "        token = request.token_ids[request.num_prompt_tokens + place]\n",
    "        token = request.token_ids[index]\n",
    caught_by="test_any_output_token_can_be_asked_about",
    believes="index counts in token_ids",
    name="index-in-all-tokens",
)
mutant(
    CHECK,
    "length = place + 1",
    "length = request.num_output_tokens",
    caught_by="test_min_tokens_counts_up_to_the_token_that_is_asked_about",
    believes="the output is as long as it is, whichever token is asked about",
    name="whole-length",
)
mutant(
    CHECK,
    "        if length >= params.min_tokens:\n",
    "        if length >= params.max_tokens:\n            return Status.FINISHED_LENGTH\n"
    "        if length >= params.min_tokens:\n",
    caught_by="test_a_stop_on_the_last_token_is_a_stop",
    believes="length is asked first, it is the cheaper question",
    name="length-first",
)

mutant(
    STEP,
    "            except BaseException:\n",
    "            except Exception:\n",
    caught_by="test_a_failed_step_costs_nobody_what_was_computed_before_it",
    believes="Ctrl-C ends the process anyway",
    name="not-for-ctrl-c",
)
mutant(
    STEP,
    "                self.scheduler.undo(out, swapped_out=swapped)\n",
    "",
    caught_by="test_a_failed_step_costs_nobody_what_was_computed_before_it",
    believes="atomic takes it back as well, so undo can be spared",
    name="without-undo",
)
mutant(
    STEP,
    "            swapped = False\n",
    "            swapped = True\n",
    caught_by="test_a_step_that_fails_while_swapping_out",
    believes="it is the forward pass that fails, not the copies",
    name="trusts-copies-that-were-not-made",
)
mutant(
    STEP,
    "            swapped = False\n            try:\n"
    "                self.runner.swap(out)\n                swapped = True\n",
    "            self.runner.swap(out)\n            swapped = True\n            try:\n",
    caught_by="test_a_failed_step_costs_nobody_what_was_computed_before_it",
    believes="only the forward pass can fail",
    name="swap-outside-the-try",
)
mutant(
    STEP,
    "                self.scheduler.undo(out, swapped_out=swapped)\n                raise\n",
    "                self.scheduler.undo(out, swapped_out=swapped)\n                return []\n",
    caught_by="test_a_failed_step_has_not_happened",
    believes="the caller need not know; the next step tries again",
    name="swallows-the-error",
)
mutant(
    STEP,
    "                    status = self.check_stop(request)\n"
    "                    if status is not None:\n"
    "                        self.scheduler.finish(request, status)\n"
    "                        break\n",
    "                    status = self.check_stop(request)\n"
    "                if status is not None:\n"
    "                    self.scheduler.finish(request, status)\n",
    caught_by="test_several_tokens_in_a_step_end_right_after_a_stop",
    believes="the last token of a step says whether to stop",
    name="asks-about-the-last-token-only",
)
mutant(
    STEP,
    "                for token in self.accept(request, n, tokens):\n",
    "                self.accept(request, n, tokens)\n                for token in tokens:\n",
    caught_by="test_right_drafts_and_one_more_token_are_delivered",
    believes="every sampled row is a token of the text",
    name="delivers-after-a-wrong-draft",
)
mutant(
    STEP,
    "                for token in self.accept(request, n, tokens):\n",
    "                request.num_computed_tokens += n\n                request.spec_token_ids = []\n"
    "                for token in tokens[:1]:\n",
    caught_by="test_right_drafts_and_one_more_token_are_delivered",
    believes="a step gives a request one token",
    name="one-token-a-step",
)
mutant(
    STEP,
    "                if new_tokens:\n                    outputs",
    "                if True:\n                    outputs",
    caught_by="test_a_chunk_in_mid_prompt_gives_no_output",
    believes="every scheduled request has an output",
    name="outputs-without-tokens",
)
mutant(
    STEP,
    "                    outputs.append(self.output(request, new_tokens))\n",
    "                    outputs.append(self.output(request, request.output_token_ids))\n",
    caught_by="test_every_token_is_delivered_once_and_in_place",
    believes="new_token_ids are all tokens so far",
    name="delivers-again",
)
mutant(
    STEP,
    "            for request, _, _ in out.admitted:\n                self.scheduler.drop_swap(request)\n",
    "",
    caught_by="test_the_host_copies_of_a_resumed_request_are_given_up",
    believes="the host copies are freed when the request ends",
    name="keeps-host-copies",
)
mutant(
    STEP,
    "            swapped = False\n",
    "            [self.scheduler.drop_swap(request) for request, _, _ in out.admitted]\n            swapped = False\n",
    caught_by="test_a_step_that_fails_while_swapping_in",
    believes="once the plan stands, the host copies are as good as restored",
    name="drops-host-copies-too-early",
)
mutant(
    STEP,
    "            self.num_scheduled_tokens += out.num_tokens\n",
    "            self.num_scheduled_tokens += len(out.scheduled)\n",
    caught_by="test_counters_add_up",
    believes="a request in the batch is a token",
    name="counts-requests",
)
mutant(
    STEP,
    "            swapped = False\n",
    "            self.num_steps += 1\n            swapped = False\n",
    caught_by="test_counters_add_up",
    believes="a step counts when it starts, and again when it ends",
    name="counts-steps-twice",
)
mutant(
    STEP,
    "            if out.empty:\n                return []\n",
    "            if out.empty:\n                self.num_steps += 1\n                return []\n",
    caught_by="test_nothing_to_do_is_no_step",
    believes="an idle step is a step",
    name="counts-idle-steps",
)
mutant(
    STEP,
    "            outputs = []\n",
    '            outputs = self.__dict__.setdefault("_outputs", [])\n',
    caught_by="test_a_hundred_decode_steps_keep_nothing",
    believes="outputs are collected until somebody takes them",
    name="keeps-all-outputs",
)
mutant(
    STEP,
    "            for request, _, _ in out.admitted:\n                self.scheduler.drop_swap(request)\n",
    "",
    caught_by="TestRandomTrafficThroughStep",
    believes="the host copies are freed when the request ends",
    name="keeps-host-copies-in-traffic",
)
mutant(
    STEP,
    "            if out.empty:\n",
    "            if not out.scheduled:\n",
    caught_by="test_a_step_that_only_preempts_is_a_step_too",
    believes="nothing scheduled is nothing to do",
    name="skips-a-step-of-copies",
)
mutant(
    STEP,
    "        with self.atomic:\n            out = self.scheduler.schedule()\n",
    "        if True:\n            out = self.scheduler.schedule()\n",
    caught_by="test_an_interrupt_at_any_line_of_a_step_has_not_happened",
    believes="between the plan and the commit is all that can fail",
    name="not-atomic",
)
mutant(
    STEP,
    "        with self.atomic:\n            out = self.scheduler.schedule()\n",
    "        out = self.scheduler.schedule()\n        with self.atomic:\n",
    caught_by="test_an_interrupt_at_any_line_of_a_step_has_not_happened",
    believes="planning only plans",
    name="plans-outside",
)
