"""What run.py remembers between calls, in .progress.json: the last results of the graders and the hints shown."""

import json
from pathlib import Path

from engine.exercises.source import write_atomically

FILE = ".progress.json"


def load(root: Path) -> dict:
    """{"results": {full name: {...}}, "ran": when, "hints": {full name: how many were shown}}; empty if unreadable."""
    try:
        state = json.loads((root / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        state = {}
    state = state if isinstance(state, dict) else {}
    for key in ("results", "hints"):
        if not isinstance(state.get(key), dict):
            state[key] = {}
    return state


def save(root: Path, state: dict) -> None:
    write_atomically(root / FILE, json.dumps(state, indent=1, sort_keys=True) + "\n")
