"""Floor 3: calls the roles in order. It sees no logits, no parameters, no tasks and no names of algorithms."""
