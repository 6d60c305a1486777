"""A Hugging Face checkpoint folder as a running model: everything is checked before the first weight is allocated.

Only safetensors files are read: they hold numbers and nothing that could be executed.
"""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from engine.models.config import Qwen3Config
from engine.models.known import resolve
from engine.models.qwen3 import Qwen3

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FILE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # safetensors' names
MAX_HEADER = 100_000_000  # bytes; the format's own limit


def load(path, dtype=None, device=None) -> tuple[Qwen3, Tokenizer | None]:
    """The model in the folder `path`, ready for inference, and its tokenizer if there is a tokenizer.json.

    path: a folder, or a name of `engine.models.known` such as "tiny".
    dtype: torch.float32, bfloat16 or float16, or its name; None: what config.json says, else that of the files.
    device: None is the CPU. One tensor at a time is read and converted, so memory never holds the weights twice.
    `model.cfg.eos_token_id` comes from generation_config.json, else from config.json.
    Raises FileNotFoundError for a file that is not there and ValueError for one that does not fit: one line, which
    names the file and what is wrong. There is no half-loaded model.
    """
    folder = resolve(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    cfg = _read_config(folder)
    headers = _read_headers(_weight_files(folder))
    model = _build(folder, cfg, len(headers))
    wanted = _match(folder, model, headers)
    dtype = _choose_dtype(folder, cfg, headers, dtype)
    _read_weights(folder, model, wanted, dtype, device)
    return model.requires_grad_(False).eval(), _read_tokenizer(folder)


def _read_json(file: Path) -> dict:
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file}: a JSON object was expected, this is a {type(content).__name__}")
    return content


def _read_config(folder: Path) -> Qwen3Config:
    content, file = _read_json(folder / "config.json"), folder / "config.json"
    if (folder / "generation_config.json").is_file():
        eos = _read_json(folder / "generation_config.json").get("eos_token_id")
        if eos is not None:
            content["eos_token_id"] = eos
    try:
        return Qwen3Config.from_dict(content)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """The safetensors files, each with the tensors the index expects in it; None where there is no index."""
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: None}
    if not (folder / INDEX).is_file():
        raise FileNotFoundError(f"{folder}: neither {SINGLE} nor {INDEX} (other weight formats are not read)")
    weight_map = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{folder / INDEX}: weight_map is missing or empty")
    shards: dict[Path, set[str] | None] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(f"{folder / INDEX}: {tensor} is said to be in {name!r}, not a safetensors file beside it")
        shards.setdefault(folder / name, set()).add(tensor)
    for file in shards:
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such file, but {INDEX} names it")
    return shards


def _read_header(file: Path) -> dict[str, tuple[list[int], str]]:
    """Shape and dtype of each tensor in the file, with nothing of its data read."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
    if size < 8 or length > min(size - 8, MAX_HEADER):
        raise ValueError(f"{file}: truncated or not safetensors (header of {length} bytes in a file of {size})")
    try:
        with safe_open(file, framework="pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 - no mapping
            return {name: (part.get_shape(), part.get_dtype()) for name, part in slices.items()}
    except SafetensorError as error:
        raise ValueError(f"{file}: damaged or truncated ({' '.join(str(error).split())})") from None


def _read_headers(shards: dict[Path, set[str] | None]) -> dict[str, tuple[Path, list[int], str]]:
    """File, shape and dtype of every tensor."""
    headers = {}
    for file, expected in shards.items():
        header = _read_header(file)
        if expected is not None and (wrong := sorted(expected ^ header.keys())):
            raise ValueError(f"{file}: it {'holds' if wrong[0] in header else 'lacks'} {wrong[0]}, unlike {INDEX} says")
        headers |= {name: (file, *entry) for name, entry in header.items()}
    return headers


def _build(folder: Path, cfg: Qwen3Config, num_tensors: int) -> Qwen3:
    """The modules on the meta device: shapes without memory."""
    file = folder / "config.json"
    if cfg.num_hidden_layers > num_tensors:
        raise ValueError(f"{file}: num_hidden_layers is {cfg.num_hidden_layers}; the files hold {num_tensors} tensors")
    try:
        with torch.device("meta"):
            return Qwen3(cfg)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise ValueError(f"{file}: no model of such sizes can be built ({str(error).splitlines()[0]})") from None


def _match(folder: Path, model: Qwen3, headers: dict) -> dict[str, tuple]:
    """The headers by parameter, in the model's order, after a check that names and shapes agree with the model."""
    expected = {name: list(value.shape) for name, value in model.state_dict().items()}
    optional = {"lm_head.weight"} if model.cfg.tie_word_embeddings else set()
    # Older Llama files store the rotary frequencies, which follow from the config.
    found = {name: header for name, header in headers.items() if not name.endswith("rotary_emb.inv_freq")}
    missing, unexpected = expected.keys() - found.keys() - optional, found.keys() - expected.keys()
    for kind, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(f"{folder}: {kind} tensors {', '.join(sorted(names)[:3])}{more}")
    for name, (file, shape, dtype) in found.items():
        if shape != expected[name]:
            raise ValueError(f"{file}: {name} has shape {shape}; config.json asks for {expected[name]}")
        if dtype not in FILE_DTYPES:
            raise ValueError(f"{file}: {name} has dtype {dtype}; readable are {', '.join(FILE_DTYPES)}")
    return {name: found[name] for name in expected if name in found}


def _choose_dtype(folder: Path, cfg: Qwen3Config, headers: dict, dtype) -> torch.dtype:
    said, where = (cfg.dtype, f"{folder / 'config.json'}: ") if dtype is None else (dtype, "")
    if said is None:
        return FILE_DTYPES[headers["model.embed_tokens.weight"][2]]
    chosen = DTYPES.get(said) if isinstance(said, str) else said
    if chosen not in DTYPES.values():
        raise ValueError(f"{where}dtype is {said!r}; it must be one of {', '.join(DTYPES)}")
    return chosen


def _read_weights(folder: Path, model: Qwen3, wanted: dict[str, tuple], dtype: torch.dtype, device) -> None:
    open_file, tensors = None, None
    state = {}
    for name, (file, _, _) in sorted(wanted.items(), key=lambda item: item[1][0]):  # file by file
        if file != open_file:
            open_file, tensors = file, safe_open(file, framework="pt")
        # A copy even where nothing changes: the tensor is a window on the file, which may be overwritten later.
        state[name] = tensors.get_tensor(name).to(device=device or "cpu", dtype=dtype, copy=True)
    if model.cfg.tie_word_embeddings:
        head, embedding = state.get("lm_head.weight"), state["model.embed_tokens.weight"]
        if head is not None and not torch.equal(head, embedding):
            raise ValueError(f"{folder}: tie_word_embeddings is true, but lm_head.weight is not the embedding")
        state["lm_head.weight"] = embedding
    model.load_state_dict(state, assign=True)
    model.tie_weights()


def _read_tokenizer(folder: Path) -> Tokenizer | None:
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(f"{file}: not a tokenizer ({error})") from None
