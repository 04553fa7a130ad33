"""Pages 26 to 28: the three forces, the gaps, and which bottleneck to mend first."""
