"""Pages 24 and 25: planted bugs, and where the time of kernels goes."""
