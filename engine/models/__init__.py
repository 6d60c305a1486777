"""Models that load Hugging Face checkpoints by name: qwen3.py (Qwen3 and Llama), made of layers.py; loading.py."""
