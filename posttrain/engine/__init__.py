"""Floor 2: models, the head, the learner, and the engines that sample."""
