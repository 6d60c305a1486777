"""`run.py grade`: a class of submissions, each exercise marked by the graders of its chapter."""

from engine.exercises.grading.grade import grade

__all__ = ["grade"]
