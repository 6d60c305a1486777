"""The teaching machinery: which functions are exercises, and whose body each of them runs."""

from engine.exercises.registry import exercise, fill

__all__ = ["exercise", "fill"]
