"""Loads the exported directory with transformers and asks it for a sum."""

from __future__ import annotations

from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("trained")
model = AutoModelForCausalLM.from_pretrained("trained")
ids = tokenizer("<3+4>", return_tensors="pt", add_special_tokens=False).input_ids
said = model.generate(ids, max_new_tokens=16, do_sample=False)
print(tokenizer.decode(said[0]))
