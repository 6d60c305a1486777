"""Other right answers of chapter 31: the scheduler and the loop."""

from tests.alternatives import alternative

alternative(
    "Scheduler.schedule",
    name="two-phases-over-copies",
    source="""
    def schedule(self):
        from collections import deque

        out, manager = SchedulerOutput(), self.blocks
        left = self.config.max_num_batched_tokens
        queue, gone = deque(self.running), set()
        while queue and left:
            request = queue.popleft()
            if request in gone:
                continue
            want = request.num_tokens_with_spec - request.num_computed_tokens
            if self.config.long_prefill_token_threshold:
                want = min(want, self.config.long_prefill_token_threshold)
            want = min(want, left)
            while request not in gone and not manager.allocate_slots(request, want):
                last = self.running[len(self.running) - 1]
                gone.add(last)
                self.preempt(last, out)
            if request not in gone:
                manager.cache_full_blocks(request, request.num_computed_tokens + want)
                out.scheduled.append((request, want))
                left -= want
        if gone:
            return out
        while len(self.waiting) and left and len(self.running) != self.config.max_num_seqs:
            request = self.waiting.first()
            hit = manager.find_cached_prefix(request)
            old, new = request.num_computed_tokens, len(hit) * manager.block_size
            want = request.num_tokens - (new if new > old else old)
            if self.config.long_prefill_token_threshold:
                want = min(want, self.config.long_prefill_token_threshold)
            if want > left:
                if request.num_preemptions == 0 and not self.config.enable_chunked_prefill:
                    return out
                want = left
            if not manager.allocate_slots(request, want, hit):
                return out
            if request.swapped_out:
                table = manager.block_tables[request]
                places = range(len(hit), manager.blocks_for(old))
                if places:
                    entry = request, [table[i] for i in places], [request.swapped_out[i] for i in places]
                    out.swap_in.append(entry)
            request.num_computed_tokens = new if new > old else old
            if request.num_cached_tokens is None:
                request.num_cached_tokens = new
            self.start_running(request)
            out.admitted.append((request, len(hit), old))
            manager.cache_full_blocks(request, request.num_computed_tokens + want)
            out.scheduled.append((request, want))
            left -= want
        return out
    """,
)
alternative(
    "Scheduler.schedule",
    name="recursion-and-publishing-at-the-end",
    source='''
    def schedule(self):
        """Admissions publish at once, so that the next one can adopt; running requests publish before them."""
        out, config = SchedulerOutput(), self.config

        def room():
            return config.max_num_batched_tokens - out.num_tokens

        def clamp(n):
            caps = [room(), n]
            if config.long_prefill_token_threshold > 0:
                caps.append(config.long_prefill_token_threshold)
            return min(caps)

        def grow(request, n):
            if self.blocks.allocate_slots(request, n):
                return True
            victim = self.running[-1]
            self.preempt(victim, out)
            return victim is not request and grow(request, n)

        def run(place):
            if place >= len(self.running) or room() == 0:
                return
            request = self.running[place]
            n = clamp(request.num_tokens_with_spec - request.num_computed_tokens)
            if grow(request, n):
                out.scheduled.append((request, n))
                run(place + 1)

        run(0)
        for request, n in out.scheduled:
            self.blocks.cache_full_blocks(request, request.num_computed_tokens + n)

        def admit(request):
            adopted = self.blocks.find_cached_prefix(request)
            before = request.num_computed_tokens
            computed = max(before, self.blocks.block_size * len(adopted))
            whole = config.enable_chunked_prefill or request.num_preemptions > 0
            if not whole and request.num_tokens - computed > room():
                return False
            n = clamp(request.num_tokens - computed)
            if not self.blocks.allocate_slots(request, n, tuple(adopted)):
                return False
            request.num_computed_tokens = computed
            if request.num_preemptions == 0:
                request.num_cached_tokens = len(adopted) * self.blocks.block_size
            host = (request.swapped_out or [])[len(adopted) : self.blocks.blocks_for(before)]
            if host:
                device = self.blocks.block_tables[request][len(adopted) : len(adopted) + len(host)]
                out.swap_in.append((request, device, host))
            self.start_running(request)
            out.admitted.append((request, len(adopted), before))
            out.scheduled.append((request, n))
            self.blocks.cache_full_blocks(request, computed + n)
            return True

        if not out.preempted:
            while self.num_waiting and room() and self.num_running < config.max_num_seqs:
                if not admit(self.waiting.first()):
                    break
        return out
    ''',
)
alternative(
    "Scheduler.preempt",
    name="queue-first-blocks-last",
    source="""
    def preempt(self, request, out):
        out.preempted.append(request)
        self.stop_running(request)
        request.num_preemptions += 1
        request.spec_token_ids = []
        size, computed = self.blocks.block_size, request.num_computed_tokens
        device = [b for i, b in enumerate(self.blocks.block_tables[request]) if i * size < computed]
        swap = self.config.preemption_mode == "swap" and bool(device)
        request.swapped_out = self.take_host_blocks(len(device)) if swap else None
        if request.swapped_out is not None:
            out.swap_out.append((request, device, list(request.swapped_out)))
        else:
            request.num_computed_tokens = 0
        self.blocks.free(request)
    """,
)
alternative(
    "Scheduler.preempt",
    name="looks-at-the-free-host-blocks",
    source="""
    def preempt(self, request, out):
        needed = -(-request.num_computed_tokens // self.config.block_size)
        table = list(self.blocks.block_tables[request])
        self.blocks.free(request)
        if self.config.preemption_mode == "swap" and 0 < needed <= len(self.free_host_blocks):
            request.swapped_out = self.take_host_blocks(needed)
            out.swap_out.append((request, table[:needed], request.swapped_out))
        else:
            request.num_computed_tokens = 0
        request.spec_token_ids.clear()
        out.preempted.append(request)
        request.num_preemptions = request.num_preemptions + 1
        self.stop_running(request)
    """,
)
alternative(
    "EngineCore.check_stop",
    name="as-a-table",
    source="""
    def check_stop(self, request, index=-1):
        output, params = request.output_token_ids, request.params
        place = range(len(output))[index]
        token, length = output[place], place + 1
        eos = request.eos_token_id
        ends = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
        may_stop = length >= params.min_tokens
        rules = [
            (may_stop and token in ends and not params.ignore_eos, Status.FINISHED_STOPPED, None),
            (may_stop and token in params.stop_token_ids, Status.FINISHED_STOPPED, token),
            (length >= params.max_tokens, Status.FINISHED_LENGTH, None),
            (request.num_prompt_tokens + length >= self.max_model_len, Status.FINISHED_LENGTH, None),
        ]
        for holds, status, reason in rules:
            if holds:
                if reason is not None:
                    request.stop_reason = reason
                return status
        return None
    """,
)
alternative(
    "EngineCore.step",
    name="commit-in-a-helper",
    source="""
    def step(self):
        with self.atomic:
            out, done = self.scheduler.schedule(), []
            if not out.scheduled and not out.preempted:
                return []
            try:
                self.runner.swap(out)
                done.append("swap")
                sampled = self.runner.execute(out, self.blocks.block_tables)
                done.append("execute")
            finally:
                if len(done) < 2:
                    self.scheduler.undo(out, swapped_out=bool(done))
            self.num_steps += 1
            self.num_preemptions += len(out.preempted)
            self.num_scheduled_tokens += sum(n for _, n in out.scheduled)
            for admission in out.admitted:
                self.scheduler.drop_swap(admission[0])

            def commit(request, n, tokens):
                kept = []
                for token in self.accept(request, n, tokens):
                    kept.append(token)
                    request.append(token)
                    status = self.check_stop(request, request.num_output_tokens - 1)
                    if status:
                        self.scheduler.finish(request, status)
                        return kept
                return kept

            pairs = [(request, commit(request, n, sampled[i])) for i, (request, n) in enumerate(out.scheduled)]
            return [self.output(request, kept) for request, kept in pairs if kept]
    """,
)
alternative(
    "EngineCore.step",
    name="appends-all-then-cuts",
    source='''
    def step(self):
        """Asks check_stop by index after all tokens are there, and cuts what follows the first stop."""
        with self.atomic:
            out = self.scheduler.schedule()
            if out.empty:
                return []
            swapped = False
            try:
                self.runner.swap(out)
                swapped = True
                results = self.runner.execute(out, self.blocks.block_tables)
            except:  # noqa: E722
                self.scheduler.undo(out, swapped)
                raise
            outputs = []
            for (request, n), tokens in zip(out.scheduled, results):
                new = list(self.accept(request, n, tokens))
                begin = request.num_output_tokens
                for token in new:
                    request.append(token)
                for place in range(begin, begin + len(new)):
                    status = self.check_stop(request, place)
                    if status is not None:
                        del request.token_ids[request.num_prompt_tokens + place + 1 :]
                        new = new[: place - begin + 1]
                        self.scheduler.finish(request, status)
                        break
                if new:
                    outputs.append(self.output(request, new))
            for request, *_ in out.admitted:
                self.scheduler.drop_swap(request)
            self.num_steps, self.num_preemptions = self.num_steps + 1, self.num_preemptions + len(out.preempted)
            self.num_scheduled_tokens += out.num_tokens
            return outputs
    ''',
)
