"""Are two mathematical answers the same? Found, spelled one way and compared by rules of our own; what those leave
open, by math-verify.

`extract` finds the answer in a response, `spelling` gives every notation one spelling, `reading` with `numerals` and
`units` turns it into the `values` numbers, lists, sets, intervals, choices and words, `equal` decides, `grade` puts
them together, `algebra` is asked in a worker process only.
"""
