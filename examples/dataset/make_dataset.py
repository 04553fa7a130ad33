"""Writes the folder `squares`: a data set with the columns question, answer and solution."""

from __future__ import annotations

from datasets import Dataset

rows = [
    {"question": f"{a} times {a} is ", "answer": str(a * a), "solution": str(a * a + (a % 4 == 0))} for a in range(60)
]
Dataset.from_list(rows).save_to_disk("squares")
print(f"squares: {len(rows)} rows")
