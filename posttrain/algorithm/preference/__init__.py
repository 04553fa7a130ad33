"""The losses of judged completions: links of a margin, pairs and rankings, reward models.

Begin with `preference_loss`.
"""
