"""What a checkpoint's config.json says, checked before anything is built from it."""

from dataclasses import dataclass

MODEL_TYPES = ("qwen3", "llama")
REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass
class Qwen3Config:
    """Sizes and constants of one model, under Hugging Face's names; ValueError where they contradict each other.

    eos_token_id: None, one id or a tuple of ids. qk_norm: False for Llama. dtype: the name of the weights' dtype, or
    None.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 32_768
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    qk_norm: bool = True
    eos_token_id: int | tuple[int, ...] | None = None
    dtype: str | None = None

    def __post_init__(self):
        for name in (*REQUIRED, "num_key_value_heads", "head_dim", "max_position_embeddings"):
            _check_count(name, getattr(self, name))
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value!r}; it must be a positive number")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary positions turn pairs, so it must be even")
        self.eos_token_id = _token_ids(self.eos_token_id)

    @classmethod
    def from_dict(cls, config: dict) -> "Qwen3Config":
        """The config of a Hugging Face config.json of model_type "qwen3" or "llama".

        ValueError for another model type, a missing or impossible value, and whatever these modules do not compute
        (scaled RoPE, sliding windows, an activation other than SiLU, biases in the MLP, quantized weights).
        """
        model_type = config.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ValueError(f"model_type is {model_type!r}; known are {', '.join(MODEL_TYPES)}")
        if missing := [name for name in REQUIRED if config.get(name) is None]:
            raise ValueError(f"{', '.join(missing)} missing")
        for name in REQUIRED:
            _check_count(name, config[name])
        _refuse_unknown_features(config)
        given = {name: config[name] for name in cls.__dataclass_fields__ if config.get(name) is not None}
        given.setdefault("num_key_value_heads", config["num_attention_heads"])
        given["rope_theta"] = _rope_theta(config)
        given["qk_norm"] = model_type == "qwen3"
        given["dtype"] = config.get("dtype") or config.get("torch_dtype")  # the older name
        if model_type == "qwen3":  # what an older config.json leaves out
            defaults = {"head_dim": 128, "max_position_embeddings": 32_768}
        else:
            defaults = {
                "head_dim": config["hidden_size"] // config["num_attention_heads"],
                "max_position_embeddings": 2_048,
            }
        return cls(**(defaults | given))


def _check_count(name: str, value) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a positive integer")


def _refuse_unknown_features(config: dict) -> None:
    if (act := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ValueError(f"hidden_act is {act!r}; only silu is supported")
    for name in ("use_sliding_window", "mlp_bias", "quantization_config"):
        if config.get(name):
            raise ValueError(f"{name} is {config[name]!r}, which is not supported")


def _rope_theta(config: dict) -> float:
    """rope_theta stands at the top level, or in rope_parameters as transformers 5 writes it."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_parameters is {rope!r}; it must be an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rope_type is {kind!r}; only 'default' is supported")
    theta = rope.get("rope_theta", config.get("rope_theta"))
    return 10_000.0 if theta is None else theta


def _token_ids(value) -> int | tuple[int, ...] | None:
    """An id, or several; lists become tuples."""
    ids = value if isinstance(value, list | tuple) else () if value is None else (value,)
    if any(not isinstance(i, int) or isinstance(i, bool) for i in ids):
        raise ValueError(f"eos_token_id is {value!r}; it must be an integer or a list of them")
    return tuple(value) if isinstance(value, list) else value
