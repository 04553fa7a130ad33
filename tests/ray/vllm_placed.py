"""vLLM's engines as actors of a real Ray cluster, which the test starts and ends (`make test-ray-vllm`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("vllm")

from posttrain.config.placement import Ray
from posttrain.engine.pool.ray_actor import RayCluster
from tests.conformance.test_vllm_placed import HOW, plays_on_though_one_is_killed


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    there = RayCluster(None, 2, 1, 60.0)
    yield there
    there.close()


@pytest.mark.parametrize("server", [False, True], ids=["in the actor", "a server of its own"])
def test_a_run_on_two_actors_with_vllm_of_which_one_is_killed(
    server: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: RayCluster
) -> None:
    """The same run as in processes: an actor is killed as the third version comes, and replaced."""
    how = replace(HOW, update="inflight", server=server)
    plays_on_though_one_is_killed(how, Ray(engines=2), tmp_path, monkeypatch)
