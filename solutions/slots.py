"""Answers to chapter 24."""

import torch


class ContinuousBatchingEngine:
    def admit(self):
        admitted = []
        for slot, owner in enumerate(self.slots):
            if owner is None and self.waiting:
                request = self.waiting.popleft()
                request.slot = slot
                self.slots[slot] = request
                admitted.append(request)
        return admitted

    def prefill_chunk(self, request):
        start = request.num_computed
        chunk = request.prompt_token_ids[start : start + self.chunk_size]
        end = start + len(chunk)
        input_ids = torch.tensor([chunk], device=self.device)  # [1, T]
        positions = torch.arange(start, end, device=self.device)[None]  # [1, T]
        hidden_states = self.forward(input_ids, positions, self.cache.view([request.slot], end))
        token = None
        if end == len(request.prompt_token_ids):
            token = self.pick_tokens([request], hidden_states[:, -1])[0]
        request.num_computed = end
        return token

    def decode(self, requests):
        input_ids = torch.tensor([[r.output_token_ids[-1]] for r in requests], device=self.device)  # [B, 1]
        positions = torch.tensor([[r.num_computed] for r in requests], device=self.device)  # [B, 1]
        longest = max(r.num_computed for r in requests) + 1
        view = self.cache.view([r.slot for r in requests], longest)
        hidden_states = self.forward(input_ids, positions, view)
        tokens = self.pick_tokens(requests, hidden_states[:, -1])
        for r in requests:
            r.num_computed += 1
        return tokens

    def step(self):
        self.admit()
        running = [r for r in self.slots if r is not None]
        prefilling = [r for r in running if r.in_prefill]
        decoding = [r for r in running if not r.in_prefill]
        for request in prefilling:
            token = self.prefill_chunk(request)
            if token is not None:
                self.accept(request, token)
        if decoding:
            for request, token in zip(decoding, self.decode(decoding), strict=True):
                self.accept(request, token)
        if running:
            self.num_steps += 1
        updates, self.updates = self.updates, []
        return updates
