"""Right answers of chapter 24, built differently."""

from tests.alternatives import alternative

alternative(
    "ContinuousBatchingEngine.admit",
    name="highest-slot-first",
    source='''
        def admit(self):
            count = min(len(self.waiting), self.slots.count(None))
            requests = [self.waiting.popleft() for _ in range(count)]
            free = [slot for slot, owner in enumerate(self.slots) if owner is None]
            for request in requests:
                request.slot = free.pop()
                self.slots[request.slot] = request
            return requests
    ''',
)
alternative(
    "ContinuousBatchingEngine.prefill_chunk",
    name="by-list",
    source='''
        def prefill_chunk(self, request):
            prompt, todo = request.prompt_token_ids, len(request.prompt_token_ids) - request.num_computed
            where = [request.num_computed + i for i in range(min(todo, self.chunk_size))]
            view = self.cache.view([request.slot], where[-1] + 1)
            ids = torch.tensor([prompt[i] for i in where], device=self.device)
            hidden = self.forward(ids.view(1, -1), torch.tensor(where, device=self.device).view(1, -1), view)
            tokens = self.pick_tokens([request], hidden[0, -1:]) if len(where) == todo else [None]
            request.num_computed += len(where)
            return tokens[0]
    ''',
)
alternative(
    "ContinuousBatchingEngine.decode",
    name="in-slot-order",
    source='''
        def decode(self, requests):
            rows = sorted(requests, key=lambda r: r.slot)
            last = [len(r.prompt_token_ids) + len(r.output_token_ids) - 1 for r in rows]
            positions = torch.tensor(last, device=self.device).unsqueeze(1)
            ids = torch.tensor([r.output_token_ids[-1] for r in rows], device=self.device).unsqueeze(1)
            hidden = self.forward(ids, positions, self.cache.view([r.slot for r in rows], max(last) + 1))
            token_of = dict(zip(rows, self.pick_tokens(rows, hidden.squeeze(1)), strict=True))
            for r, position in zip(rows, last, strict=True):
                r.num_computed = position + 1
            return [token_of[r] for r in requests]
    ''',
)
alternative(
    "ContinuousBatchingEngine.step",
    name="one-pass",
    source='''
        def step(self):
            self.admit()
            decoding, busy = [], False
            for request in list(self.slots):
                if request is None:
                    continue
                busy = True
                if not request.in_prefill:
                    decoding.append(request)
                elif (token := self.prefill_chunk(request)) is not None:
                    self.accept(request, token)
            if decoding:
                tokens = self.decode(decoding)
                for i, request in enumerate(decoding):
                    self.accept(request, tokens[i])
            self.num_steps += busy
            updates = list(self.updates)
            self.updates.clear()
            return updates
    ''',
)
