"""The mathematics: credit, loss and preferences. Pure functions of data, without side effects. `credit` goes from
rewards to advantages, `loss` from log-probs to one number, `preference` from judged completions to a loss. The types of
the pieces are in `posttrain.ladder.pieces`, and `register` says how others get their mathematics."""
