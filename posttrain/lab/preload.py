"""Modules that a training process has imported before it begins: every lesson, so the library, with one thread."""

import torch

from posttrain.lab.catalog import entries, load

torch.set_num_threads(1)
for entry in entries():
    load(entry.name)
