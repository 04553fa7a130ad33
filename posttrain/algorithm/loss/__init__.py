"""The loss of a minibatch: weights, push, trust region, correction, regularisers. torch.

Begin with `policy_loss`; `losses` is what the trainer uses of it.
"""
