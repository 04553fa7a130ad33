"""The mathematics: credit, loss and preferences. Pure functions of data, without side effects.

`credit` goes from rewards to advantages, `loss` from log-probs to one number, `preference` from judged completions to a
loss. The function of a piece is registered for its type (`register`); the types are in `posttrain.ladder.pieces`.
"""
