"""The model that trains, and frozen copies of it that only score. Begin with `learner`."""
