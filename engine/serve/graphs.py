"""A runner whose decode steps have fixed shapes and addresses, so that a CUDA graph can replay them."""

import time

import torch

from engine.exercises import exercise, fill
from engine.serve.batch import BatchMeta, build_batch, int_tensor
from engine.serve.device_sampler import DeviceSampler, drawn_with, filtered
from engine.serve.flight import Flight
from engine.serve.rows import Field, Rows
from engine.serve.runner import ModelRunner
from engine.serve.sampler import SimpleSampler

RING = 3  # packed buffers on the host: one being filled, two whose copies may be under way


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes that get a graph: powers of two, then every 16th; padding costs at most 15 rows or half of them."""
    sizes = [1, 2, 4, 8, *range(16, max_num_seqs, 16), max_num_seqs]
    return sorted({size for size in sizes if size <= max_num_seqs})


@exercise(33, "Static buffers")
def decode_inputs(packed, tables, width, previous, block_size):
    """What a decode step computes from its packed numbers, on the device.  (Your engine: Chapter 33)

    packed: [9, B] i64, lines as in Field.  tables: [num_rows * width + 1] i32, the rows' block ids, flat.
    previous: [P] i64, the tokens that the step before sampled.
    First the updates: tables[CELL] = BLOCK, in place (columns without one write the last cell, which nobody reads).
    Returns (tokens [B] i64, positions [B] i64, seq_lens [B] i32, block_table [B, width] i32, slots [B] i64).
    tokens: previous[SOURCE] where SOURCE is not -1, else TOKEN.  positions: POSITION, 0 for padding (position -1).
    seq_lens: position + 1; 0 for padding.  block_table: row ROW of the tables.  slots: where K and V of the token go,
    block_table[position // block_size] * block_size + position % block_size; -1 for padding.
    No loop over rows, no wait for the device, and no shape that depends on values: the very same operations are
    recorded once and replayed with other numbers in `packed`.
    """
    raise NotImplementedError


class GraphRunner(ModelRunner):
    """ModelRunner whose steps can be launched without a wait, and whose decode steps run in static buffers.

    mode: "on" captures a CUDA graph for each size of `capture_sizes` and replays it; "static" runs the same code
    without capture, anywhere; "off" builds every step anew.  Prefill and mixed steps are always built anew.
    """

    def __init__(self, model, config, num_blocks, num_host_blocks=0, sampler=None, max_model_len=None, mode="off"):
        super().__init__(model, config, num_blocks, num_host_blocks, sampler)
        self.mode, device = mode, self.model.device
        self.max_model_len = max_model_len or self.model.cfg.max_position_embeddings
        self.drawer = self.sampler if isinstance(self.sampler, DeviceSampler) else DeviceSampler()
        self.sizes = capture_sizes(config.max_num_seqs)
        most, cuda = self.sizes[-1], device.type == "cuda"
        self.rows = Rows(3 * most, -(-self.max_model_len // config.block_size), device)
        shape = len(Field), most
        self.packed = torch.zeros(shape, dtype=torch.int64, device=device)
        self._ring = [torch.zeros(shape, dtype=torch.int64, pin_memory=cuda) for _ in range(RING)]
        self._numbers = [host.numpy() for host in self._ring]
        self._copied = [torch.cuda.Event() if cuda else None for _ in range(RING)]
        self._host_ids = [torch.zeros(2 * most, dtype=torch.int64, pin_memory=cuda) for _ in range(RING)]
        self._turn = 0
        self.previous = torch.zeros(most, dtype=torch.int64, device=device)
        self._order: list = []  # whose tokens lie in `previous`, in order; None for all but a request's newest
        self._hosted: set = set()  # requests in rows whose tokens the host samples or looks at
        self._newest: tuple = (0, None)  # (turn, flight) of the launch whose tokens are in `previous`
        self._launching = False  # has a launch begun that did not end well?
        self._starts = {size: torch.arange(size + 1, dtype=torch.int32) for size in self.sizes}
        self._device_starts = {size: starts.to(device) for size, starts in self._starts.items()}
        self._graphs: dict[int, tuple] = {}
        if mode == "on":
            self.capture()

    # -- the decode step

    def decode_step(self, size: int, seq_lens_cpu=None):
        """The first `size` columns of packed -> (tokens [size] i64, in self.previous too; hidden [size, hidden])."""
        packed, block_size = self.packed[:, :size], self.config.block_size
        tokens, positions, seq_lens, table, slots = decode_inputs(
            packed, self.rows.tables, self.rows.width, self.previous, block_size
        )
        if seq_lens_cpu is None:
            seq_lens_cpu = torch.zeros(size, dtype=torch.int32)
        meta = BatchMeta(
            self._device_starts[size], seq_lens, table, slots, block_size, self._starts[size], seq_lens_cpu,
            max_query_len=1, max_seq_len=self.max_model_len,
        )  # fmt: skip
        hidden = self.model.forward(tokens, positions, self.kv_caches, meta, self.backend)
        heats = packed[Field.HEAT].view(torch.float64).float()
        logits = self.model.compute_logits(hidden)
        ids = self.drawer.draw(logits, heats, packed[Field.SEED], packed[Field.PLACE])
        self.previous[:size] = ids
        return ids, hidden

    @torch.inference_mode()
    def capture(self) -> None:
        """Record the decode step of every size, largest first, into one pool of memory that all of them share."""
        pool = torch.cuda.graph_pool_handle()
        padding = torch.zeros_like(self._ring[0])
        padding[Field.POSITION] = padding[Field.SOURCE] = -1
        padding[Field.CELL] = self.rows.unused
        self.packed.copy_(padding)
        for size in reversed(self.sizes):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # compiles kernels and warms libraries up, which may not be recorded
                self.decode_step(size)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                outputs = self.decode_step(size)
            self._graphs[size] = graph, *outputs
        torch.cuda.synchronize()

    # -- launching

    @torch.inference_mode()
    def launch(self, out, block_tables) -> Flight:
        """Start a planned step; its tokens come with `Flight.tokens`.  One that raises leaves the one before intact."""
        begin = time.perf_counter()
        if self._launching:
            self._recover()
        self._launching = True
        if self.mode != "off" and self._is_decode(out.scheduled):
            flight = self._launch_decode(out.scheduled, block_tables)
        else:
            flight = self._launch_any(out.scheduled, block_tables)
        order = []
        for (request, _), count in zip(flight.scheduled, flight.counts, strict=True):
            if count:
                order += [None] * (count - 1) + [request]
        self.seconds["forward"] += time.perf_counter() - begin
        return self._launched(flight, order) or flight

    def _launched(self, flight, order) -> None:
        """One line, and no other runs after it, so callers `return self._launched(...) or flight`: an interrupt finds a
        launch that is done or one that is none."""
        self._order, self._newest, self._launching = order, (self._turn, flight), False

    def _recover(self) -> None:
        """After a launch that broke off: `previous` from the host, and rows whose updates may not have arrived anew."""
        self._turn, flight = self._newest  # or the flight's buffer would come round too early
        self.rows.table_of = [None] * self.rows.num_rows
        if flight is not None:
            ids = torch.tensor(flight.sampled(), dtype=torch.int64)[: len(self.previous)]
            self.previous[: len(ids)] = ids.to(self.previous.device)

    def execute(self, out, block_tables) -> list[list[int]]:
        """One forward pass over the plan -> for each scheduled request the token ids sampled from its rows."""
        if not out.scheduled:
            return []
        flight = self.launch(out, block_tables)
        begin = time.perf_counter()
        tokens = flight.tokens()
        self.seconds["sample"] += time.perf_counter() - begin
        return tokens

    def _is_decode(self, scheduled) -> bool:
        """Does every request compute exactly its newest token?"""
        return 0 < len(scheduled) <= self.sizes[-1] and all(
            n == 1 and request.num_computed_tokens + 1 == len(request.token_ids) and not request.spec_token_ids
            for request, n in scheduled
        )

    def _launch_decode(self, scheduled, block_tables) -> Flight:
        size = next(size for size in self.sizes if size >= len(scheduled))
        sources = self._sources([request for request, _ in scheduled])
        self.rows.fill(self._next_packed(size), scheduled, block_tables, sources, self._enter)
        flight, hidden = self._start(scheduled, size)
        self._hosted = {request for request in self._hosted if not request.status.finished}
        if self._hosted and any(request in self._hosted for request, _ in scheduled):
            flight.rows = [(request, request.num_output_tokens) for request, _ in scheduled]
            logits = self.model.compute_logits(hidden[: len(scheduled)]).float()
            self._finish_on_host(flight, logits, [])
        return self._send(flight)

    def _next_packed(self, size: int):
        """The packed numbers of a coming decode step on the host, [9, size], to be written."""
        self._turn = (self._turn + 1) % RING
        if (copied := self._copied[self._turn]) is not None:
            copied.synchronize()  # its last copy has left the buffer
        return self._numbers[self._turn][:, :size]

    def _start(self, scheduled, size: int) -> tuple[Flight, torch.Tensor]:
        """Launch the decode step whose packed numbers are written -> (flight, hidden [size, hidden])."""
        host, count = self._ring[self._turn], len(scheduled)
        self.packed.copy_(host, non_blocking=True)
        if self._copied[self._turn] is not None:
            self._copied[self._turn].record()
        if self.mode == "on":
            graph, ids, hidden = self._graphs[size]
            graph.replay()
        else:
            with torch.inference_mode():
                ids, hidden = self.decode_step(size, (host[Field.POSITION, :size] + 1).int())
        ids, host_ids, vocab = ids[:count], self._host_ids[self._turn][:count], self.model.cfg.vocab_size
        return Flight(scheduled, [1] * count, ids, host_ids, vocab=vocab, size=size), hidden

    def can_repeat(self, flight) -> bool:
        """Is this decode step of packed numbers the newest launch, and had the host nothing to sample in it?"""
        return flight is self._newest[1] and not flight.rows and not self._launching

    def launch_again(self, flight, grown, block_tables) -> Flight:
        """Start the step after a flight that `can_repeat`: the same requests in the same order, a token further each.

        grown: those whose block tables have one block more than at that flight.  What `launch` would do, for less: a
        replay needs no inference mode, which takes as long to enter as the replay itself.
        """
        begin = time.perf_counter()
        self._launching = True
        scheduled, before = flight.scheduled, self._numbers[self._turn][:, : flight.size]
        self.rows.follow(self._next_packed(flight.size), before, len(scheduled), grown, block_tables)
        flight = self._send(self._start(scheduled, flight.size)[0])
        self.seconds["forward"] += time.perf_counter() - begin
        return self._launched(flight, self._order) or flight

    def _launch_any(self, scheduled, block_tables) -> Flight:
        device = self.model.device
        batch = build_batch(scheduled, block_tables, self.config.block_size, device)
        if any(request.num_placeholders for request, _ in scheduled):
            self._fill_placeholders(batch, scheduled)
        hidden = self.model.forward(batch.input_ids, batch.positions, self.kv_caches, batch.meta, self.backend)
        logits = self.model.compute_logits(hidden[batch.logits_indices])
        num_sampled = sum(batch.sample_counts)
        rows = [
            (request, request.num_output_tokens + j)
            for (request, _), count in zip(scheduled, batch.sample_counts, strict=True)
            for j in range(count)
        ]
        heats = torch.tensor([self.heat(request) for request, _ in rows])
        seeds = int_tensor([drawn_with(request.params)[1] for request, _ in rows], torch.int64)
        places = int_tensor([place for _, place in rows], torch.int64)
        ids = self.drawer.draw(logits[:num_sampled], *(x.to(device) for x in (heats, seeds, places)))
        self.previous[: min(num_sampled, len(self.previous))] = ids[: len(self.previous)]
        self._turn = turn = (self._turn + 1) % RING
        long = num_sampled > len(self._host_ids[turn])
        host_ids = torch.empty_like(ids, device="cpu") if long else self._host_ids[turn][:num_sampled]
        flight = Flight(scheduled, batch.sample_counts, ids, host_ids, rows=rows, vocab=self.model.cfg.vocab_size)
        if any(self._needs_host(request) for request, _ in scheduled):
            self._finish_on_host(flight, logits.float(), batch.prompt_spans)
        return self._send(flight)

    def _fill_placeholders(self, batch, scheduled) -> None:
        """Put the tokens that are still on the device in where the host has PLACEHOLDER."""
        rows, row = [], -1
        for request, n in scheduled:
            row += n
            if request.num_placeholders:
                rows.append(row)
        sources = self._sources([request for request, _ in scheduled if request.num_placeholders])
        rows, sources = (int_tensor(x, torch.int64, self.model.device) for x in (rows, sources))
        batch.input_ids[rows] = self.previous[sources]

    def _sources(self, requests: list) -> list[int]:
        """Where in `previous` the newest token of each lies, -1 if the host has it."""
        if requests == self._order and all(request.num_placeholders for request in requests):
            return list(range(len(requests)))
        place = {request: i for i, request in enumerate(self._order)}
        return [place[request] if request.num_placeholders else -1 for request in requests]

    def _enter(self, request) -> float:
        """The device's temperature for a request that gets a row."""
        if self._needs_host(request):
            self._hosted.add(request)
        return self.heat(request)

    def _send(self, flight: Flight) -> Flight:
        """Start the copy of the tokens to the host."""
        flight.host_ids.copy_(flight.ids, non_blocking=True)
        if self.model.device.type == "cuda":
            flight.event = torch.cuda.Event()
            flight.event.record()
        return flight

    # -- what the device cannot sample

    def heat(self, request) -> float:
        """The temperature with which the device draws for a request; 0 also where the host will do it."""
        return drawn_with(request.params)[0] if self._drawn_on_device(request) else 0.0

    def _drawn_on_device(self, request) -> bool:
        if request.params.temperature == 0:
            return isinstance(self.sampler, SimpleSampler)
        return isinstance(self.sampler, DeviceSampler) and not filtered(request.params)

    def _needs_host(self, request) -> bool:
        params = request.params
        return params.logprobs is not None or params.prompt_logprobs is not None or not self._drawn_on_device(request)

    def _finish_on_host(self, flight: Flight, logits, prompt_spans) -> None:
        """Sample the rows that the device could not, and keep the logits for log-probabilities.  Waits."""
        mine = [i for i, (request, _) in enumerate(flight.rows) if not self._drawn_on_device(request)]
        if mine:
            tokens = self.sampler(logits[mine], [flight.rows[i] for i in mine])
            flight.known = dict(zip(mine, tokens, strict=True))
            places = [i for i in mine if i < len(self.previous)]
            self.previous[places] = torch.tensor(tokens[: len(places)], device=self.previous.device)
        flight.record = logits, prompt_spans


fill(__name__)
