"""Pages L1 to L6: the ladder of a small model, from its architecture to GRPO."""
