"""Search at inference: several answers or steps are sampled, and scores decide which one is given."""

from __future__ import annotations
