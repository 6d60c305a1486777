from engine.serve.scheduler import SchedulerOutput


class Scheduler:
    def schedule(self):
        config, blocks, out = self.config, self.blocks, SchedulerOutput()
        budget = config.max_num_batched_tokens
        cap = config.long_prefill_token_threshold or budget

        def plan(request, n):
            out.scheduled.append((request, n))
            blocks.cache_full_blocks(request, request.num_computed_tokens + n)

        i = 0
        while i < len(self.running) and budget > 0:
            request = self.running[i]
            n = min(request.num_tokens_with_spec - request.num_computed_tokens, cap, budget)
            while not (fits := blocks.allocate_slots(request, n)):
                victim = self.running[-1]
                self.preempt(victim, out)
                if victim is request:
                    break
            if fits:
                plan(request, n)
                budget -= n
                i += 1

        while not out.preempted and self.waiting and budget > 0 and len(self.running) < config.max_num_seqs:
            request = self.waiting.first()
            adopted = blocks.find_cached_prefix(request)
            before = request.num_computed_tokens
            computed = max(before, len(adopted) * blocks.block_size)
            n = min(request.num_tokens - computed, cap)
            if n > budget and not config.enable_chunked_prefill and request.num_preemptions == 0:
                break
            n = min(n, budget)
            if not blocks.allocate_slots(request, n, adopted):
                break
            request.num_computed_tokens = computed
            if request.num_cached_tokens is None:
                request.num_cached_tokens = len(adopted) * blocks.block_size
            if request.swapped_out is not None:
                missing = slice(len(adopted), blocks.blocks_for(before))
                device, host = blocks.block_tables[request][missing], request.swapped_out[missing]
                if device:
                    out.swap_in.append((request, device, host))
            out.admitted.append((request, len(adopted), before))
            self.start_running(request)
            plan(request, n)
            budget -= n
        return out

    def preempt(self, request, out):
        host = None
        num_blocks = self.blocks.blocks_for(request.num_computed_tokens)
        if self.config.preemption_mode == "swap" and num_blocks > 0:
            host = self.take_host_blocks(num_blocks)
        if host is None:
            request.num_computed_tokens = 0
        else:
            out.swap_out.append((request, self.blocks.block_tables[request][:num_blocks], host))
            request.swapped_out = host
        request.spec_token_ids = []
        self.blocks.free(request)
        request.num_preemptions += 1
        self.stop_running(request)
        out.preempted.append(request)
