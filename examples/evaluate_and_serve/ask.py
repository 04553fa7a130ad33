"""Asks the served run one question, with nothing but the standard library."""

from __future__ import annotations

import json
import os
from urllib.request import Request, urlopen

ADDRESS = "http://127.0.0.1:8123/v1/completions"

question = {"model": "sums", "prompt": "<3+4>", "max_tokens": 16, "temperature": 0}
request = Request(
    ADDRESS,
    data=json.dumps(question).encode(),
    headers={"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['EXAMPLE_TOKEN']}"},
)
with urlopen(request, timeout=60) as response:
    print(json.load(response)["choices"][0]["text"])
