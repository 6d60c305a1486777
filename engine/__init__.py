"""Your engine: an LLM inference engine, one function at a time."""
