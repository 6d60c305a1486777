"""Triton's interpreter, watched: where a kernel loads from, numbers that need no memory, programs of large numbers."""

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder as Program


class Loads:
    """A context: counts in `outside` the numbers that are loaded from none of these tensors; such loads give zeros.

    far: (tensor, index, value): as if that tensor were long enough to have this number there.
    """

    def __init__(self, tensors, far=None):
        self.ranges = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors]
        self.outside, self.place, self.value = 0, None, 0.0
        if far is not None:
            tensor, index, self.value = far
            self.place = tensor.data_ptr() + index * tensor.element_size()

    def __enter__(self):
        self._plain = plain = Program.create_masked_load

        def load(builder, pointers, mask, *rest):
            at, on = np.broadcast_arrays(pointers.data, mask.data)
            inside = np.zeros(at.shape, dtype=bool)
            for low, high in self.ranges:
                inside |= (at >= low) & (at < high)
            self.outside += int((on.astype(bool) & ~inside).sum())
            handle = plain(builder, pointers, type(mask)(on.astype(bool) & inside, mask.dtype), *rest)
            handle.data = np.where(inside, handle.data, 0).astype(handle.data.dtype)
            if self.place is not None:
                handle.data[on.astype(bool) & (at == self.place)] = self.value
            return handle

        Program.create_masked_load = load
        return self

    def __exit__(self, *error):
        Program.create_masked_load = self._plain


def far_program(plain, number: int):
    """create_get_program_id with programs of the second axis counted from `number` on."""

    def get(builder, axis):
        handle = plain(builder, axis)
        if axis == 1:
            handle.data = handle.data + np.asarray(number, dtype=handle.data.dtype)
        return handle

    return get
