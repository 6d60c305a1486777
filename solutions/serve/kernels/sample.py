import triton.language as tl


def sample_kernel(
    logits, temperatures, seeds, places, values, ids, row_stride,
    VOCAB: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    n, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, seed, place = tl.load(temperatures + n), tl.load(seeds + n), tl.load(places + n)
    tiles = tl.cdiv(tl.cdiv(VOCAB, TILE), PARTS)
    best, best_id = tl.full([], float("-inf"), tl.float32), tl.full([], VOCAB, tl.int32)
    for tile in range(part * tiles, (part + 1) * tiles):
        token = tile * TILE + tl.arange(0, TILE)
        score = tl.load(logits + n * row_stride + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
        if temperature > 0:
            zeros = (token * 0).to(tl.uint32)
            bits, _, _, _ = tl.philox(seed, token.to(tl.uint32), place.to(tl.uint32) + zeros, zeros, zeros)
            uniform = ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2^-23
            score = score - temperature * tl.log(-tl.log(uniform))
        number = score == score
        score = tl.where(number, score, float("inf"))  # a NaN wins, and is no token
        largest = tl.max(score, 0)
        first = tl.min(tl.where(number & (score == largest), token, VOCAB), 0)
        best, best_id = tl.maximum(largest, best), tl.where(largest > best, first, best_id)
    tl.store(values + n * PARTS + part, best)
    tl.store(ids + n * PARTS + part, best_id.to(tl.int64))
