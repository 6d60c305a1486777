"""What a GGUF file says about itself, with every size checked against the file before anything is allocated.

GGUF is the format of llama.cpp: magic, version and two counts; then keys with typed values; then name, shape, type and
offset of each tensor; then, aligned, their data. All numbers are little-endian. Needs the package `gguf`.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
VERSIONS = (2, 3)
MAX_ENTRIES, MAX_ELEMENTS, MAX_DIMS = 65_536, 2_000_000, 4  # keys or tensors; of an array; of a shape


@dataclass
class Tensor:
    """shape as PyTorch has it, slowest axis first; the data are num_bytes bytes from `start` of the file."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    num_bytes: int


class GGUFFile:
    """fields: key -> int, float, bool, str, or a list of them.  tensors: name -> Tensor.

    ValueError, which names the file and the place, for anything that is not as the format has it.
    """

    def __init__(self, path):
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"{self.path}: no such file")
        self.size = self.path.stat().st_size
        if self.size < 24:
            raise ValueError(f"{self.path}: {self.size} bytes are too few for a GGUF file")
        with self.path.open("rb") as stream:
            self._data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        try:
            self._read_header()
        except ValueError as error:
            raise ValueError(f"{self.path}: not a sound GGUF file ({error})") from None

    def array(self, name: str) -> np.ndarray:
        """The tensor's values in float32, in its shape."""
        tensor = self.tensors[name]
        raw = np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.start)
        try:
            values = dequantize(raw.reshape(*tensor.shape[:-1], -1), tensor.kind)
        except NotImplementedError:
            raise ValueError(f"{self.path}: {name} has type {tensor.kind.name}, which is not read") from None
        return np.array(values, np.float32).reshape(tensor.shape)  # a copy: the file may change later

    def _read_header(self) -> None:
        if self._take(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        if (version := self._scalar("I")) not in VERSIONS:
            raise ValueError(f"version {version}; readable are {VERSIONS}")
        num_tensors, num_fields = self._scalar("Q"), self._scalar("Q")
        if max(num_tensors, num_fields) > MAX_ENTRIES:
            raise ValueError(f"{num_tensors} tensors and {num_fields} keys; at most {MAX_ENTRIES} are read")
        self.fields = {}
        for _ in range(num_fields):
            key = self._string()
            if key in self.fields:
                raise ValueError(f"key {key!r} twice")
            self.fields[key] = self._value(self._scalar("I"))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        self.tensors = self._place(infos)

    def _place(self, infos) -> dict[str, Tensor]:
        """Tensors with their place in the file: inside it and, taken together, no larger than it."""
        alignment = self.fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise ValueError(f"general.alignment is {alignment!r}")
        begin = -(-self._at // alignment) * alignment
        tensors = {}
        for name, shape, kind, offset in infos:
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if shape[-1] % block:
                raise ValueError(f"{name}: rows of {shape[-1]} values, no multiple of the {block} in a block")
            num_bytes = prod(shape) // block * block_bytes
            if num_bytes > self.size - begin - offset:
                raise ValueError(f"{name}: {num_bytes} bytes from byte {begin + offset}, past its end {self.size}")
            if name in tensors:
                raise ValueError(f"tensor {name!r} twice")
            tensors[name] = Tensor(shape, kind, begin + offset, num_bytes)
        if (total := sum(tensor.num_bytes for tensor in tensors.values())) > self.size:
            raise ValueError(f"tensors of {total} bytes in a file of {self.size}")
        return tensors

    def _tensor_info(self):
        name, num_dims = self._string(), self._scalar("I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise ValueError(f"{name}: {num_dims} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(num_dims))[::-1]  # the file has the fastest axis first
        if min(shape) < 1:
            raise ValueError(f"{name}: shape {list(shape)}")
        return name, shape, GGMLQuantizationType(self._scalar("I")), self._scalar("Q")

    def _value(self, kind: int):
        if kind == STRING:
            return self._string()
        if kind in SCALARS:
            return self._scalar(SCALARS[kind])
        if kind != ARRAY:
            raise ValueError(f"value type {kind} at byte {self._at}")
        kind, count = self._scalar("I"), self._scalar("Q")
        if count > MAX_ELEMENTS or kind not in (STRING, *SCALARS):
            raise ValueError(f"array of {count} values of type {kind} at byte {self._at}")
        if kind == STRING:
            return [self._string() for _ in range(count)]
        layout = f"<{count}{SCALARS[kind]}"
        return list(struct.unpack(layout, self._take(struct.calcsize(layout))))

    def _string(self) -> str:
        return self._take(self._scalar("Q")).decode("utf-8")

    def _scalar(self, code: str):
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _take(self, count: int) -> bytes:
        if count > self.size - self._at:
            raise ValueError(f"{count} bytes wanted at byte {self._at} of {self.size}")
        self._at += count
        return self._data[self._at - count : self._at]
