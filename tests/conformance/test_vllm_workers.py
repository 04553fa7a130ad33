"""vLLM of two workers (`engine.workers=2`): each holds a part of every layer, and together they serve what was sent.

`make test-vllm-workers`, on two cores. The conformance suite itself runs over them with
`POSTTRAIN_ENGINES=vllm-workers`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import posttrain
from posttrain.build.build_run import probe_ids
from posttrain.engine.vllm import worker_parts
from posttrain.engine.vllm.inprocess import VLLMEngine
from posttrain.engine.vllm.vllm_server import VLLMServer
from posttrain.record.run_reader import steps as read_steps
from posttrain.role.learning.logprob_tolerance import LEAST, packed_text
from posttrain.role.sync import Sync, whole_tensors
from posttrain.system.errors import EngineError, InvariantError
from tests.conformance import subjects
from tests.conformance.subjects import Subject, contract, segment
from tests.conformance.test_server_life import alive, soon

pytestmark = pytest.mark.skipif(
    not {"vllm", "vllm-server"} & set(subjects.ENGINES), reason="needs vLLM: make test-vllm-workers"
)
SERVED = [f"{n}-workers" for n in ("vllm", "vllm-server") if n in subjects.ENGINES]


@pytest.fixture(scope="module", params=SERVED)
def two(request: pytest.FixtureRequest) -> Iterator[Subject]:
    torch.set_num_threads(1)
    found = subjects.subject(request.param)
    asyncio.run(found.publish(1))
    yield found
    found.close()
    subjects.subject.cache_clear()


def ask(subject: Subject, method: str, *args: Any) -> list[Any]:
    """What each worker answers."""
    engine: Any = subject.sampler
    if isinstance(engine, VLLMServer):
        return asyncio.run(_call(engine, method, *args))
    return engine._engine.collective_rpc(method, args=args)


async def _call(engine: VLLMServer, method: str, *args: str) -> list[Any]:
    return await engine._call(method, *args)


def gaps(subject: Subject) -> tuple[float, np.ndarray]:
    """Worst gap of what is said, against the learner; and the engine's log-probs of the probe."""

    async def main() -> tuple[float, np.ndarray]:
        prompt, wanted = subject.ids("3+4="), contract()
        said = await subject.say([prompt] * 12, wanted)
        assert {v for s in said for v in s.version.tolist()} == {subject.sampler.version}
        worst = subject.gap([segment(prompt, s, wanted) for s in said]).max()
        return float(worst), await subject.sampler.score(probe_ids(subject.policy))

    return asyncio.run(main())


# --- what is served ---------------------------------------------------------------------------------------------------


def test_each_worker_holds_a_part_of_every_cut_tensor(two: Subject) -> None:
    """And together all of it, by vLLM's own word; no worker holds a whole matrix but the one of key-value heads."""
    first, second = ask(two, "posttrain_digests", json.dumps(subjects_wanted(two)))
    own = {n: tuple(t.shape) for n, t in two.policy.module.named_parameters()}
    assert set(first["digests"]) == set(second["digests"]) == set(own)
    cut = {n for n, shape in own.items() if len(shape) > 1}
    assert set(first["parts"]) == set(second["parts"]) == cut
    for name in cut:
        pair = [worker_parts.WorkerPart.read(one["parts"][name]) for one in (first, second)]
        if ".k_proj." in name or ".v_proj." in name:
            assert [p.size for p in pair] == [32, 32], "one head of 32, which both hold"
        else:
            assert sum(p.size for p in pair) == own[name][pair[0].axis], name
            assert pair[0].ranges[0][0] == 0 < pair[1].ranges[0][0]
        assert pair[0].axis == (1 if "o_proj" in name or "down_proj" in name else 0), name


def subjects_wanted(subject: Subject) -> Any:
    engine: Any = subject.sampler
    return engine._expected.wanted()


def test_log_probs_are_the_learners_and_follow_each_push(two: Subject) -> None:
    seen = list[np.ndarray]()
    for seed in (2, 3, 1):
        asyncio.run(two.publish(seed))
        worst, scored = gaps(two)
        ours = two.learner.score(packed_text(probe_ids(two.policy)))
        assert worst < LEAST["float32"].worst and np.abs(scored - ours).max() < LEAST["float32"].worst
        seen.append(scored)
    assert all(np.abs(a - b).mean() > 0.1 for a, b in itertools.pairwise(seen)), "a push changes them"


def test_weights_come_in_buckets(two: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several files, none larger than the bound unless it is one tensor; what is served is the same."""
    sizes = list[int]()
    module = (
        "posttrain.engine.vllm.worker_parts"
        if isinstance(two.sampler, VLLMServer)
        else "posttrain.engine.vllm.weight_updates"
    )

    def counted(bucket: dict[str, torch.Tensor], path: Path) -> None:
        sizes.append(sum(t.nbytes for t in bucket.values()) if len(bucket) > 1 else 0)
        save_file(bucket, path)

    monkeypatch.setattr(f"{module}.save_file", counted)
    monkeypatch.setattr(worker_parts, "BUCKET", 20_000)
    asyncio.run(two.publish(4))
    assert len(sizes) > 5 and max(sizes) <= 20_000
    assert gaps(two)[0] < LEAST["float32"].worst


# --- what goes wrong --------------------------------------------------------------------------------------------------


@contextmanager
def only_one_is_sent(subject: Subject, sent: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    """Inside, worker 0 gets an update as it is, and worker 1 gets `sent` of it: vLLM hands out a list by worker."""
    engine: Any = subject.sampler
    if isinstance(engine, VLLMServer):
        post = engine._post

        async def posted(path: str, body: Any, **how: Any) -> Any:
            if path == "/update_weights":
                body = {"update_info": [body["update_info"], sent(body["update_info"])]}
            return await post(path, body, **how)

        engine._post = posted  # type: ignore[method-assign]
        try:
            yield
        finally:
            engine._post = post  # type: ignore[method-assign]
        return
    rpc = engine._engine.collective_rpc

    def called(method: str, *args: Any, **how: Any) -> Any:
        if method == "update_weights":
            info = how["kwargs"]["update_info"]
            how = {**how, "kwargs": {"update_info": [info, sent(info)]}}
        return rpc(method, *args, **how)

    engine._engine.collective_rpc = called
    try:
        yield
    finally:
        engine._engine.collective_rpc = rpc


def test_a_worker_that_misses_a_push_is_found(two: Subject, tmp_path: Path) -> None:
    """Worker 1 gets nothing, and so keeps the weights of the push before. The sync stops and says which worker."""
    before = asyncio.run(kept(two))
    with (
        only_one_is_sent(two, lambda info: {"tensors": []}),
        pytest.raises(InvariantError, match=r"weight sync of version[\s\S]*worker 1 of 2 serves \d+ tensors otherwise"),
    ):
        asyncio.run(two.publish(5))
    worst, scored = gaps(two)
    assert worst > 10 * LEAST["float32"].worst, "and what it would have said is neither model's"
    assert np.abs(scored - before).mean() > 0.01
    asyncio.run(two.publish(1))
    assert gaps(two)[0] < LEAST["float32"].worst


async def kept(two: Subject) -> np.ndarray:
    return await two.sampler.score(probe_ids(two.policy))


def test_a_worker_that_gets_the_push_before_is_found(two: Subject, tmp_path: Path) -> None:
    """The same with a whole file: worker 1 reads that of an older version."""
    stale = tmp_path / "stale.safetensors"
    asyncio.run(two.publish(6))
    save_file({n: t.clone().contiguous() for n, t in whole_tensors(two.learner.shards())}, stale)
    with (
        only_one_is_sent(two, lambda info: {"path": str(stale)}),
        pytest.raises(InvariantError, match=r"worker 1 of 2 serves \d+ tensors otherwise"),
    ):
        asyncio.run(two.publish(7))
    asyncio.run(two.publish(1))
    assert gaps(two)[0] < LEAST["float32"].worst


def test_one_bit_in_the_part_of_one_worker_is_found(two: Subject, tmp_path: Path) -> None:
    """A column of `down_proj` that worker 1 holds. Worker 0 may have it wrong: it does not compute with it."""
    asyncio.run(two.publish(8))
    right = {n: t.clone().contiguous() for n, t in whole_tensors(two.learner.shards())}
    name = next(n for n in right if n.endswith("down_proj.weight"))
    right[name].view(torch.int32)[3, -1] ^= 1
    file = tmp_path / "bit.safetensors"
    save_file(right, file)
    with (
        only_one_is_sent(two, lambda info: {"path": str(file)}),
        pytest.raises(InvariantError, match=f"1 tensors.*{name}"),
    ):
        asyncio.run(two.publish(8))
    engine: Any = two.sampler
    version = engine.version
    served = asyncio.run(engine.load(version + 1, list(right.items())))
    assert served != two.learner.fingerprint() and "worker" not in served, "all serve it: it is what was sent"
    asyncio.run(two.publish(1))


def test_a_worker_that_computes_otherwise_is_found(two: Subject) -> None:
    """The right weights, used wrongly by one worker: its attention has another scale. The canary finds it."""
    if isinstance(two.sampler, VLLMServer):
        pytest.skip("a server takes no functions")
    engine: Any = two.sampler
    engine._engine.collective_rpc(louder, args=(2.0,))
    sync = Sync(two.learner, two.sampler, probe_ids(two.policy))
    with pytest.raises(InvariantError, match="scores a canary otherwise than the learner"):
        asyncio.run(sync.push(two.sampler.version + 1))
    engine._engine.collective_rpc(louder, args=(0.5,))
    asyncio.run(sync.push(two.sampler.version + 1))


def louder(worker: Any, by: float) -> None:
    """Runs in each worker; the second one changes its attention."""
    if worker.rank == 1:
        for module in worker.get_model().modules():
            if hasattr(module, "impl") and hasattr(module.impl, "scale"):
                module.impl.scale *= by


def test_a_worker_that_dies_ends_the_engine() -> None:
    """Turns fail with the role, soon, and no worker is left."""
    if "vllm" not in subjects.ENGINES:
        pytest.skip("another engine")
    policy = subjects.new_policy()
    engine = VLLMEngine(policy, slots=8, cache_bytes=64 << 20, eager=True, workers=2)
    workers = worker_ids(engine)
    subject = Subject("dying", engine, policy, subjects.HFLearner(policy), *[lambda: None] * 4)  # type: ignore[arg-type]

    async def main() -> list[Any]:
        await subject.publish(1)
        turns = [asyncio.create_task(engine.generate(subject.ids("x"), contract(max_tokens=150), i)) for i in range(40)]
        await asyncio.wait(turns, return_when=asyncio.FIRST_COMPLETED)
        begun = time.monotonic()
        os.kill(workers[1], signal.SIGKILL)
        out = await asyncio.gather(*turns, return_exceptions=True)
        assert time.monotonic() - begun < 60
        return out

    try:
        out = asyncio.run(main())
        failed = [x for x in out if isinstance(x, EngineError)]
        assert failed and all("the rollout engine (vLLM in this process) has failed" in str(x) for x in failed)
        assert engine.ended()
    finally:
        engine.close()
    assert soon(lambda: not any(alive(p) for p in workers))


def worker_ids(engine: Any) -> list[int]:
    return [w.proc.pid for w in engine._engine.engine_core.engine_core.model_executor.workers]


PROGRAM = """
import asyncio, sys
from tests.conformance import subjects
from tests.conformance.test_vllm_workers import worker_ids
from posttrain.engine.vllm.inprocess import VLLMEngine
print("begun", flush=True)
policy = subjects.new_policy()
engine = VLLMEngine(policy, slots=8, cache_bytes=1 << 24, eager=True, workers=2)
subject = subjects.Subject("mine", engine, policy, subjects.HFLearner(policy), *[lambda: None] * 4)
print("workers", *worker_ids(engine), flush=True)
async def main():
    await subject.publish(1)
    print("says", flush=True)
    while sys.argv[1] == "busy":
        await subject.say([subject.ids("x")] * 8, subjects.contract(max_tokens=150))
asyncio.run(main())
sys.stdin.read()
"""
"""A user's program without `if __name__ == "__main__"`: workers must not run it again."""


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_a_program_is_not_run_again_by_its_workers_and_takes_them_with_it(tmp_path: Path, state: str) -> None:
    """Killed while it does nothing; and while its workers compute, with one of them, for which the other waits."""
    if "vllm" not in subjects.ENGINES:
        pytest.skip("another engine")
    (tmp_path / "mine.py").write_text(PROGRAM)
    root = Path(posttrain.__file__).parents[1]
    run = subprocess.Popen(
        [sys.executable, str(tmp_path / "mine.py"), state],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    try:
        assert run.stdout is not None
        lines = list[str]()
        while "says" not in lines and (line := run.stdout.readline()):
            lines.append(line.strip())
        ours = [line for line in lines if line.startswith(("begun", "workers", "says"))]
        assert ours[0] == "begun" and len(ours) == 3, lines  # vLLM writes lines of its own
        workers = [int(pid) for pid in ours[1].split()[1:]]
        time.sleep(1)
        assert len(workers) == 2 and all(alive(p) for p in workers)
        if state == "busy":
            os.kill(workers[0], signal.SIGKILL)
    finally:
        run.send_signal(signal.SIGKILL)
        run.wait()
    assert soon(lambda: not any(alive(p) for p in workers))


# --- a run ------------------------------------------------------------------------------------------------------------

SMALL = (
    *("rl.prompts=2", "rl.siblings=4", "rl.sampling.max_tokens=6", "evaluation.samples=1", "env.heldout=2"),
    *("rl.eval_every=0", "rl.steps=3", "slots=8", "threads=1", "rl.optimizer.warmup=0"),
    *("engine=vllm", "engine.eager=true", "engine.cache_gib=0.05", "engine.workers=2"),
    *("model.hidden=64", "model.heads=2", "model.kv_heads=1"),  # vLLM for CPU attends with heads of 32 and more
)


@pytest.mark.parametrize("how", ["here", "server", "processes"])
def test_grpo_trains_through_two_workers(tmp_path: Path, how: str) -> None:
    """Each step's sampler and learner agree within the bound of float32."""
    if ("vllm-server" if how == "server" else "vllm") not in subjects.ENGINES:
        pytest.skip("another engine")
    (tmp_path / "mine.py").write_text("def odd(task, text):\n    return float(sum(map(ord, text)) % 2)\n")
    more = {"here": (), "server": ("engine.server=true",), "processes": ("placement=processes",)}[how]
    out = tmp_path / "run"
    posttrain.run("grpo", *SMALL, *more, f"env.rewards={tmp_path / 'mine.py'}:odd", out=out, quiet=True)
    steps = [s for s in read_steps(out) if s.index]
    worst = [s.gauges["canary/logp_gap_worst"].sum for s in steps if "canary/logp_gap_worst" in s.gauges]
    assert worst and max(worst) < LEAST["float32"].worst
