"""The static cache of chapter 24: one fixed row for each slot, and the view of some rows that a forward works on."""

import torch


class SlotCache:
    """K and V of all slots, allocated once: `k_cache`, `v_cache` [layers, num_slots, Hkv, slot_len, D]."""

    def __init__(self, num_layers, num_slots, num_kv_heads, slot_len, head_dim, dtype, device):
        # Zeros, because a masked key gets weight 0, and 0 times the NaN that uninitialised memory may hold is NaN.
        shape = (num_layers, num_slots, num_kv_heads, slot_len, head_dim)
        self.k_cache = torch.zeros(shape, dtype=dtype, device=device)
        self.v_cache = torch.zeros(shape, dtype=dtype, device=device)
        self.num_slots, self.slot_len = num_slots, slot_len

    def view(self, slots: list[int], length: int) -> "SlotView":
        """The cache for one forward over the rows `slots`, in that order, which reads keys 0 to length - 1."""
        if not slots or len(set(slots)) < len(slots) or min(slots) < 0 or max(slots) >= self.num_slots:
            raise ValueError(f"slots must be different numbers from 0 to {self.num_slots - 1}, got {slots}")
        if not 1 <= length <= self.slot_len:
            raise ValueError(f"length must be from 1 to {self.slot_len}, got {length}")
        return SlotView(self, slots, length)


class SlotView:
    """What the model's attention layers append to during one forward."""

    def __init__(self, cache: SlotCache, slots: list[int], length: int):
        self.cache, self.length = cache, length
        self.slots = torch.tensor(slots, device=cache.k_cache.device)
        self.k_pos = torch.arange(length, device=cache.k_cache.device)
        # Neighbouring rows are read in place; others have to be gathered, a copy of all their keys and values.
        first = slots[0]
        in_a_row = slots == list(range(first, first + len(slots)))
        self.rows = slice(first, first + len(slots)) if in_a_row else self.slots

    def append(self, layer, k, v, positions):
        """Writes k, v [B, Hkv, T, D] of the new tokens at positions [B, T]; returns what the attention reads.

        That is K and V [B, Hkv, length, D], k_pos [length] and no extra mask: key j of a row stands at position j, so
        the causal mask hides what an earlier owner of the slot has left behind the newest token.
        """
        all_k, all_v = self.cache.k_cache[layer], self.cache.v_cache[layer]
        rows = self.slots[:, None]
        all_k[rows, :, positions] = k.transpose(1, 2)
        all_v[rows, :, positions] = v.transpose(1, 2)
        return all_k[self.rows, :, : self.length], all_v[self.rows, :, : self.length], self.k_pos, None
