class OverlappedCore:
    def step(self):
        with self.atomic:
            if self.flights and self.may_preempt():
                return self.collect()
            out = self.scheduler.schedule()
            if out.empty:
                return self.collect()
            swapped = False
            try:
                self.runner.swap(out)
                swapped = True
                flight = self.runner.launch(out, self.blocks.block_tables)
            except BaseException:
                self.scheduler.undo(out, swapped_out=swapped)
                raise

            self.advance(out)
            self.flights.append(flight)
            self.num_steps += 1
            self.num_scheduled_tokens += out.num_tokens
            self.num_preemptions += len(out.preempted)
            outputs = self.collect() if len(self.flights) > 1 else []
            if not self.has_unfinished:
                outputs += self.collect()
            return outputs

    def collect(self):
        if not self.flights:
            return []
        flight = self.flights.popleft()
        outputs = []
        for (request, _), tokens in zip(flight.scheduled, flight.tokens(), strict=True):
            if not tokens or request.status.finished:
                continue
            known = request.num_tokens - request.num_placeholders
            self.atomic.before.append((request, known))
            request.token_ids[known] = tokens[0]
            request.num_placeholders -= 1
            status = self.check_stop(request, known - request.num_prompt_tokens)
            if status is not None:
                self.end(request, status)
            elif (known + 1) % self.blocks.block_size == 0:
                self.blocks.cache_full_blocks(request)
            outputs.append(self.output(request, tokens))
        for request in flight.held:
            self.blocks.free(request)
        return outputs
