"""Faults in the given code of chapter 31: requests and their samples, randomness, swap copies."""

from functools import partial

from tests.mutants import scaffold_mutant

engine = partial(scaffold_mutant, "engine/serve/engine.py")
request = partial(scaffold_mutant, "engine/serve/request.py")
sampler = partial(scaffold_mutant, "engine/serve/sampler.py")
runner = partial(scaffold_mutant, "engine/serve/runner.py")
logprobs = partial(scaffold_mutant, "engine/serve/logprobs.py")

engine(
    "if request_id in self.children or request_id in self.scheduler.requests:",
    "if request_id in self.scheduler.requests:",
    caught_by="test_a_refused_request_leaves_the_engine_untouched",
    believes="a parent id is not the id of a request",
    name="parent-id-taken-twice",
)
engine(
    "        for name in names:\n            self.scheduler.check_addable(make(name, params))\n",
    "",
    caught_by="test_a_refused_request_leaves_the_engine_untouched",
    believes="the scheduler refuses when it is asked to add",
    name="adds-some-samples",
)
engine(
    "        for name in names:\n            self.scheduler.check_addable(make(name, params))\n",
    "        if params.seed is None:\n"
    "            params = replace(params, seed=self._seeds.getrandbits(63))\n"
    "        for name in names:\n            self.scheduler.check_addable(make(name, params))\n",
    caught_by="test_a_refused_request_leaves_the_engine_untouched",
    believes="a seed more or less does not matter",
    name="spends-a-seed-on-a-refusal",
)
engine(
    "params if params.n == 1 else params.child(i)",
    "params if params.n == 1 else replace(params, n=1)",
    caught_by="test_samples_of_one_prompt_differ_and_repeat",
    believes="samples of one request share its seed",
    name="one-seed-for-all-samples",
)
engine(
    "        for name in list(self.children.get(request_id, [request_id])):\n",
    "        for name in list(self.children.get(request_id, [request_id]))[::2]:\n",
    caught_by="test_aborting_the_parent_ends_all_samples",
    believes="a list may be walked while its entries leave",
    name="aborts-every-second-sample",
)
engine(
    "        for name in list(self.children.get(request_id, [request_id])):\n",
    "        for name in [request_id]:\n",
    caught_by="test_aborting_the_parent_ends_all_samples",
    believes="samples have ids of their own to abort them by",
    name="parent-is-not-aborted",
)
engine(
    "            if not self.children[parent]:\n                del self.children[parent]\n",
    "",
    caught_by="test_aborting_the_parent_ends_all_samples",
    believes="an empty list of samples does no harm",
    name="parent-id-is-never-free-again",
)
engine(
    "            for name in list(self.scheduler.requests):\n                self.abort_request(name)\n",
    "",
    caught_by="test_a_generate_that_fails_leaves_nothing_behind",
    believes="the caller clears up",
    name="generate-leaves-requests",
)
engine(
    "            if accepted[-1] != draft:\n                break\n",
    "",
    caught_by="test_right_drafts_and_one_more_token_are_delivered",
    believes="every sampled row is a token",
    name="accepts-wrong-drafts",
)
engine(
    "        request.num_computed_tokens += n - (len(tokens) - len(accepted))\n",
    "        request.num_computed_tokens += n\n",
    caught_by="test_right_drafts_and_one_more_token_are_delivered",
    believes="a rejected draft has K/V too",
    name="rejected-drafts-count-as-computed",
)

request(
    "        if self.min_tokens > self.max_tokens:\n",
    "        if False:\n",
    caught_by="test_impossible_sampling_parameters_are_refused",
    believes="max_tokens ends it anyway",
    name="min-over-max",
)
request(
    "if not (is_number(self.temperature) and self.temperature >= 0):",
    "if self.temperature < 0:",
    caught_by="test_impossible_sampling_parameters_are_refused",
    believes="NaN is not below 0, so it is fine",
    name="nan-temperature",
)
request(
    "derive_seed(self.seed, i)",
    "self.seed + 0 * i",
    caught_by="test_sampling_parameters_of_a_child",
    believes="the index tells the samples apart",
    name="children-share-the-seed",
)
request(
    "repr(parts).encode()",
    "repr(sum(parts)).encode()",
    caught_by="test_seeds_do_not_run_together",
    believes="seed + position is a seed",
    name="seeds-run-together",
)

sampler(
    "manual_seed(derive_seed(params.seed, position))",
    "manual_seed(derive_seed(params.seed, i))",
    caught_by="test_a_seeded_text_does_not_depend_on_company_chunks_or_preemption",
    believes="a row of the batch is a request",
    name="seed-from-the-row",
)
sampler(
    "manual_seed(derive_seed(params.seed, position))",
    "manual_seed(params.seed)",
    caught_by="test_every_position_draws_anew",
    believes="the seed is the request's",
    name="same-draw-at-every-position",
)
sampler(
    "                generator = torch.Generator(logits.device).manual_seed(derive_seed(params.seed, position))\n",
    "                shared = self.__dict__.setdefault('shared', torch.Generator(logits.device).manual_seed(0))\n"
    "                generator = shared\n",
    caught_by="test_a_seeded_request_repeats_beside_an_unseeded_one",
    believes="one generator serves them all",
    name="one-generator-for-all",
)
sampler(
    "                row = logits[i : i + 1]\n",
    "                row = logits[:1]\n",
    caught_by="test_the_sampler_draws_each_row_from_its_own_seed_and_position",
    believes="the row is the first one left",
    name="draws-from-the-first-row",
)

runner(
    "                    pool[device_blocks] = store[host_blocks].to(pool.device)\n",
    "                    pool[device_blocks] = store[sorted(host_blocks)].to(pool.device)\n",
    caught_by="test_every_configuration_gives_the_text_of_one_request_alone",
    believes="blocks of one request are in order on the host",
    name="restores-in-another-order",
)
runner(
    "(request, request.num_output_tokens + j)",
    "(request, j)",
    caught_by="test_every_position_draws_anew",
    believes="positions count from the rows of this step",
    name="position-in-the-step",
)

logprobs(
    "        for position in range(start + 1, start + 1 + count):",
    "        for position in range(start, start + count):",
    caught_by="test_logprobs_are_those_of_a_full_forward_pass",
    believes="a row tells about its own token",
    name="prompt-rows-shifted",
)
logprobs(
    "    i = len(rows)\n",
    "    i = 0\n",
    caught_by="test_logprobs_are_those_of_a_full_forward_pass",
    believes="prompt rows come first",
    name="prompt-rows-first",
)
logprobs(
    "logprobs = row.log_softmax(dim=-1)",
    "logprobs = row",
    caught_by="test_logprobs_are_those_of_a_full_forward_pass",
    believes="logits are log-probabilities",
    name="logits-for-logprobs",
)
