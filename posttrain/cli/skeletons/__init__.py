"""The files that `posttrain new` writes: environments, rewards, a benchmark with its rubric."""
