"""Pages 24 and 26 to 28: who finds a bug, the three forces, the gaps, and which bottleneck to mend first."""
