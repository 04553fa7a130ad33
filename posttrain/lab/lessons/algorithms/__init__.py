"""Pages 09 to 14: the algorithms, one patch each."""
