"""Damaged checkpoints, by the hundred: always a clear error, or a model; never a crash, a hang or a flood of memory."""

import json
import resource
import shutil
import struct
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from engine.models.chat import chat_text
from engine.models.gguf_convert import convert
from engine.models.gguf_file import GGUFFile
from engine.models.loading import load
from engine.models.qwen3 import test_model as build_model
from tests.gguf_llama import tokenizer, write

MEGABYTES = 400  # more than these files can ask for, less than a size in a header can
FUZZ = settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
SIZES = st.sampled_from([0, 1, 7, 255, 2**16, 2**31 - 1, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1])
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-1, 3), st.integers(2**31, 2**70), st.floats(), st.text(max_size=5),
    st.just([]), st.just({}), st.just([1, "a"]),
)  # fmt: skip


@pytest.fixture(autouse=True)
def little_memory():
    unit = 1 if sys.platform == "darwin" else 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    yield
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - before
    assert grown < MEGABYTES << 20, f"{grown >> 20} MiB more"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A sound folder: config, weights in two shards, tokenizer, generation config, chat template."""
    folder = tmp_path_factory.mktemp("sound")
    model = build_model()
    fields = {name: value for name, value in vars(model.cfg).items() if name not in ("qk_norm", "dtype")}
    (folder / "config.json").write_text(json.dumps({**fields, "model_type": "qwen3"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    tokenizer().save(str(folder / "tokenizer.json"))
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    names = sorted(state)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, its_names in shards.items():
        save_file({name: state[name] for name in its_names}, folder / file)
    index = {name: file for file, its_names in shards.items() for name in its_names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert load(folder)[1] is not None
    return folder


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    file = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write(file)
    return file.read_bytes()


def attempt(path, action) -> None:
    """The action works, or says in one line what is wrong, with the name of the file or folder."""
    try:
        action()
    except (ValueError, OSError) as error:
        assert type(error) in (ValueError, FileNotFoundError), repr(error)
        assert "\n" not in str(error) and str(path) in str(error), str(error)


def damage(data: bytes, draw) -> bytes:
    """Cut, or with a few bytes, sizes or pieces changed."""
    data = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)) | st.integers(0, 300))
        match draw(st.sampled_from(["cut", "byte", "size", "zeros", "remove", "repeat"])):
            case "cut":
                del data[at:]
            case "byte":
                data[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case "size":
                data[at : at + 8] = struct.pack("<Q", draw(SIZES))
            case "zeros":
                data[at : at + 16] = bytes(16)
            case "remove":
                del data[at : at + draw(st.integers(1, 64))]
            case "repeat":
                data[at:at] = data[at : at + 64]
    return bytes(data)


FILES = [
    "config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json", "a.safetensors",
    "b.safetensors",
]  # fmt: skip


@pytest.mark.parametrize("name", FILES)
@FUZZ
@given(data=st.data())
def test_a_folder_with_a_damaged_file(checkpoint, tmp_path, name, data):
    folder = tmp_path / "folder"
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    (folder / name).write_bytes(damage((checkpoint / name).read_bytes(), data.draw))
    attempt(folder, lambda: load(folder))


@FUZZ
@given(data=st.data())
def test_a_config_with_other_values(checkpoint, tmp_path, data):
    folder = tmp_path / "folder"
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    config = json.loads((checkpoint / "config.json").read_text())
    names = [*config, "rope_parameters", "rope_scaling", "head_dim", "torch_dtype", "mlp_bias", "eos_token_id"]
    for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3)):
        config[name] = data.draw(VALUES)
    (folder / "config.json").write_text(json.dumps(config))
    attempt(folder, lambda: load(folder))


@FUZZ
@given(data=st.data())
def test_a_safetensors_header_with_other_values(checkpoint, tmp_path, data):
    """Sound JSON, of the right length, that says something else about shapes, types and places."""
    folder = tmp_path / "folder"
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    raw = (checkpoint / "a.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    entry = header[data.draw(st.sampled_from(sorted(header.keys() - {"__metadata__"})))]
    sizes = st.lists(SIZES | st.integers(0, 300), max_size=3)
    field, value = data.draw(
        st.one_of(
            st.tuples(st.just("shape"), sizes | VALUES),
            st.tuples(st.just("dtype"), st.sampled_from(["F32", "F64", "BF16", "I8", "F4", "BOOL", ""]) | VALUES),
            st.tuples(st.just("data_offsets"), sizes | VALUES),
        )
    )
    entry[field] = value
    text = json.dumps(header).encode()
    (folder / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    attempt(folder, lambda: load(folder))


@FUZZ
@given(data=st.data())
def test_a_damaged_gguf_file(gguf, tmp_path, data):
    file, out = tmp_path / "m.gguf", tmp_path / "out"
    out.mkdir(exist_ok=True)
    file.write_bytes(damage(gguf, data.draw))
    attempt(file, lambda: convert(file, out))


@FUZZ
@given(where=st.integers(0, 1200), size=SIZES, data=st.data())
def test_a_gguf_file_with_another_size_somewhere(gguf, tmp_path, where, size, data):
    """Counts, lengths and offsets are numbers of four or eight bytes, at any place in the header."""
    file = tmp_path / "m.gguf"
    width = data.draw(st.sampled_from([4, 8]))
    file.write_bytes(gguf[:where] + struct.pack("<Q", size)[:width] + gguf[where + width :])
    attempt(file, lambda: GGUFFile(file))


@FUZZ
@given(data=st.binary(max_size=200))
def test_anything_at_all(tmp_path, data):
    for start in (b"", b"GGUF\x03\0\0\0"):
        (tmp_path / "m.gguf").write_bytes(start + data)
        attempt(tmp_path / "m.gguf", lambda: GGUFFile(tmp_path / "m.gguf"))


@FUZZ
@given(data=st.data())
def test_a_damaged_chat_template(checkpoint, tmp_path, data):
    config = {"chat_template": "{% for m in messages %}{{ m.role + m['content'][:3] }}{% endfor %}{{ bos_token }}"}
    damaged = damage(json.dumps(config).encode(), data.draw)
    (tmp_path / "tokenizer_config.json").write_bytes(damaged)
    attempt(tmp_path, lambda: chat_text(tmp_path, [{"role": "user", "content": "hello"}]))


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ messages.append(1) }}",
        "{{ nothing.at.all }}",
        "{{ raise_exception('no system role') }}",
        "{{ 1 / 0 }}",
        "{% include '/etc/passwd' %}",
        "{{",
    ],
)
def test_a_template_that_does_what_it_must_not(tmp_path, template):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(ValueError, match="its chat template fails"):
        chat_text(tmp_path, [{"role": "user", "content": "hello"}])


def test_pickled_weights_are_not_read(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "pickled")
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    torch.save(build_model().state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="safetensors"):
        load(folder)
