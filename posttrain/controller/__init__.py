"""Floor 3: calls the roles in order; sees no logit, no parameter, no task, no algorithm name."""
