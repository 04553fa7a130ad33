"""The shipped recipes: complete runs to start from, each a function that returns a frozen `Run`.

Read `recipes` (the list, with what each run does and costs) and `example` (the tiny model and the prompts that stand in
until yours are given), then a recipe: `sft` is the shortest, `ladder` has all kinds of learning, `gallery` the tasks
with tools and programs. `data` holds the prompts, pairs and reward functions of the examples. A new recipe is a
function in a file here, and an entry of `recipes`.
"""
