"""Chat templates: from a list of messages to the text that a chat model was trained on."""

import json
from pathlib import Path

import jinja2.sandbox


def chat_text(folder: Path, messages: list[dict]) -> str:
    """Messages, each {"role": ..., "content": ...}, as the prompt for the assistant's next turn.

    The template is that of the checkpoint folder: chat_template.jinja, or chat_template in tokenizer_config.json. It
    comes with the weights and runs in Jinja's sandbox. ValueError if there is none, or if it fails.
    """
    config = _tokenizer_config(folder)
    file = folder / "chat_template.jinja"
    template = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    if isinstance(template, list):  # several with names
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    if not isinstance(template, str):
        raise ValueError(f"{folder}: no chat template, so it only continues text")
    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    sandbox.globals["raise_exception"] = _refuse
    special = {name: _text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    try:
        return sandbox.from_string(template).render(messages=messages, add_generation_prompt=True, **special)
    except Exception as error:  # what a template computes may raise anything
        raise ValueError(f"{folder}: its chat template fails ({' '.join(str(error).split())})") from None


def _refuse(message: str):
    raise jinja2.TemplateError(message)


def _tokenizer_config(folder: Path) -> dict:
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file}: a JSON object was expected, this is a {type(config).__name__}")
    return config


def _text(token) -> str:
    """A special token stands as a string, or as an object with its content."""
    return token if isinstance(token, str) else token.get("content", "") if isinstance(token, dict) else ""
