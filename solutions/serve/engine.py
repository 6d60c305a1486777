from engine.serve.request import Status


class EngineCore:
    def check_stop(self, request, index=-1):
        params = request.params
        place = index if index >= 0 else request.num_output_tokens + index
        length = place + 1  # of the output, if it ended here
        token = request.token_ids[request.num_prompt_tokens + place]
        if length >= params.min_tokens:
            eos = request.eos_token_id
            is_eos = token in eos if isinstance(eos, (tuple, list, set, frozenset)) else token == eos
            if is_eos and not params.ignore_eos:
                return Status.FINISHED_STOPPED
            if token in params.stop_token_ids:
                request.stop_reason = token
                return Status.FINISHED_STOPPED
        if length >= params.max_tokens or request.num_prompt_tokens + length >= self.max_model_len:
            return Status.FINISHED_LENGTH
        return None

    def step(self):
        with self.atomic:
            out = self.scheduler.schedule()
            if out.empty:
                return []
            swapped = False
            try:
                self.runner.swap(out)
                swapped = True
                sampled = self.runner.execute(out, self.blocks.block_tables)
            except BaseException:
                self.scheduler.undo(out, swapped_out=swapped)
                raise

            outputs = []
            for (request, n), tokens in zip(out.scheduled, sampled, strict=True):
                new_tokens, status = [], None
                for token in self.accept(request, n, tokens):
                    request.append(token)
                    new_tokens.append(token)
                    status = self.check_stop(request)
                    if status is not None:
                        self.scheduler.finish(request, status)
                        break
                if new_tokens:
                    outputs.append(self.output(request, new_tokens))
            for request, _, _ in out.admitted:
                self.scheduler.drop_swap(request)
            self.num_steps += 1
            self.num_scheduled_tokens += out.num_tokens
            self.num_preemptions += len(out.preempted)
            return outputs
