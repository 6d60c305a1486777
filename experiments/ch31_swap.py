"""What one preemption costs, with recompute and with swap, beside no decodes and beside 64.

The newest of the running requests is preempted in one step and resumed in the same step, so the step costs all that a
preemption costs; the step before, without it, is subtracted. Medians; all ways take turns in one run.
"""

import statistics
import time
from dataclasses import replace
from itertools import chain, islice

import torch

from engine.serve.config import EngineConfig
from engine.serve.engine import EngineCore
from engine.serve.request import SamplingParams
from engine.serve.scheduler import Scheduler, SchedulerOutput
from engine.serve.sizing import block_bytes

DECODES = 0, 64
REPEAT = {256: 9, 1024: 5, 4096: 3}  # times each, by the length of the victim
LENGTHS = tuple(REPEAT)
CONTEXT = 32  # prompt of each decode
WAYS = {  # block size, preemption mode, prefix caching
    "recompute": (16, "recompute", False),  # the victim's blocks are lost to others
    "recompute, cached": (16, "recompute", True),  # they are still there when it comes back
    "swap": (16, "swap", False),
    "swap, blocks of 128": (128, "swap", False),
}


class Preempting(Scheduler):
    """Preempts the last running request when told to, and lets it come back in the same step."""

    forced = False

    def schedule(self):
        before = SchedulerOutput()
        if self.forced:
            self.preempt(self.running[-1], before)
            self.forced = False
        out = super().schedule()
        out.preempted = before.preempted + out.preempted
        out.swap_out = before.swap_out + out.swap_out
        return out


def make_core(model, way, length, decodes, text, room=64):
    """An engine in which `decodes` short requests and then one of `length` tokens are past their prefill."""
    size, mode, caching = WAYS[way]
    need = [CONTEXT + room] * decodes + [length + room]
    config = EngineConfig(
        block_size=size,
        num_blocks=sum(-(-tokens // size) for tokens in need),
        max_num_batched_tokens=sum(need),
        max_num_seqs=len(need),
        preemption_mode=mode,
        enable_prefix_caching=caching,
        swap_space_bytes=-(-need[-1] // size) * block_bytes(model.cfg, size, next(model.parameters()).dtype),
    )
    core = EngineCore(model, config)
    core.scheduler = Preempting(config, core.blocks, len(core.scheduler.free_host_blocks))
    params = SamplingParams(max_tokens=room, ignore_eos=True)
    for i, tokens in enumerate(need):
        prompt = islice(chain(text[i:], text, text), tokens - room)
        core.add_request(f"r{i}", prompt, params)
    core.step()
    return core


def step_time(core, forced):
    """Seconds of one step; it ends with token ids on the host, so nothing is left in flight on a GPU."""
    core.scheduler.forced = forced
    begin = time.perf_counter()
    core.step()
    return time.perf_counter() - begin


def measure(model, length, decodes, text, repeat):
    """-> {way: (median seconds of an ordinary step, of what a preemption adds)}; RuntimeError if tokens differ."""
    cores = {way: make_core(model, way, length, decodes, text) for way in WAYS}
    victims = {way: core.scheduler.running[-1] for way, core in cores.items()}
    plain, extra = {way: [] for way in WAYS}, {way: [] for way in WAYS}
    for turn in range(repeat + 1):
        for way, core in cores.items():  # in turn, so that a slow moment of the machine meets all of them
            ordinary = step_time(core, False)
            preempted = step_time(core, True)
            if turn:  # the first round warms up
                plain[way].append(ordinary)
                extra[way].append(preempted - ordinary)
    for way, core in cores.items():
        if core.num_preemptions != repeat + 1 or core.num_steps != 2 * repeat + 3:
            raise RuntimeError(f"{way}: {core.num_preemptions} preemptions in {core.num_steps} steps")
        if victims[way].output_token_ids != victims["recompute"].output_token_ids:
            raise RuntimeError(f"{way}: the outputs differ, so there is no time to report")
    return {way: (statistics.median(plain[way]), statistics.median(extra[way])) for way in WAYS}


def main(model, verses, seed):
    text = list(chain(*verses))
    trained, wanted = model.cfg.max_position_embeddings, max(LENGTHS) + 64
    print(f"The model is trained for {trained} positions. Longer requests are timed all the same, with the limit")
    print("raised to what they need: the time does not depend on what the text is worth.")
    model.cfg = replace(model.cfg, max_position_embeddings=max(trained, wanted))
    device = next(model.parameters()).device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} thread"
    one = block_bytes(model.cfg, 1, torch.float32)
    print(f"{name}; K/V of a token {one:,} B; extra ms of one preemption (µs for each token)\n")
    print(f"{'tokens':>6}{'decodes':>9}{'step, ms':>10}" + "".join(f"{way:>21}" for way in WAYS))
    results = {}
    for decodes in DECODES:
        for length in LENGTHS:
            results[length, decodes] = found = measure(model, length, decodes, text, REPEAT[length])
            ordinary = statistics.median(seconds for seconds, _ in found.values())
            cells = (f"{1e3 * e:.2f} ({1e6 * e / length:.1f})" for _, e in found.values())
            print(f"{length:>6}{decodes:>9}{1e3 * ordinary:>10.2f}" + "".join(f"{cell:>21}" for cell in cells))
    print("\nnear or below 0: lost in the noise of the steps")
    return plot(results, name)


def plot(results, name):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(DECODES), figsize=(9.5, 4.5), sharey=True, layout="constrained")
    for axis, decodes in zip(axes, DECODES, strict=True):
        for way, marker in zip(WAYS, "osv^", strict=True):
            extra = {length: 1e3 * results[length, decodes][way][1] for length in LENGTHS}
            extra = {length: ms for length, ms in extra.items() if ms > 0}  # what is lost in the noise has no logarithm
            axis.plot(list(extra), list(extra.values()), marker + "-", label=way)
        axis.set(xscale="log", yscale="log", xlabel="tokens of the victim", title=f"beside {decodes} decodes")
        axis.set_xticks(LENGTHS, map(str, LENGTHS))
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("extra ms of one preemption")
    axes[0].legend()
    figure.suptitle(f"One preemption; {name}")
    return figure
