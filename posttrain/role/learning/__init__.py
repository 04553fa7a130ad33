"""Parts of the learner's side of a step beside the batch: demonstrations, references, teachers, replayed groups.

Also the selection of samples to imitate, the share of one rank, and the tolerance for differences of log-probs.
"""
