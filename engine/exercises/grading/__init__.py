"""`run.py grade`: a class of submissions, each exercise marked by the graders of its chapter."""
