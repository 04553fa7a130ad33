"""Decides whether two mathematical answers are the same. It uses its own rules first, and math-verify for the rest.

`extract` finds the answer in a response. `spelling` gives every notation one spelling. `read_answer`, with `numerals`
and `units`, turns it into `answer_values`: numbers, lists, sets, intervals, choices and words. `equal` compares them,
and `grade` runs all these steps. `algebra` calls math-verify and runs in a worker process only.
"""
