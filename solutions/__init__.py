"""The answers, at the same relative path and under the same qualified name as the stubs in engine/."""
