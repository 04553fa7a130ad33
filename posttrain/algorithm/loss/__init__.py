"""The loss of a minibatch: weights, push, trust region, correction, regularisers. torch.

Begin with `objective`; `losses` is what the trainer uses of it.
"""
