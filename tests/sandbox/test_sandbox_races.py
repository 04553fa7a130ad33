"""Who gives up a program ends that one and no other: the sandbox it had may run somebody else's by then."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from posttrain.core.types import Task
from posttrain.sandbox.backends import Backend, Start
from posttrain.sandbox.sandbox_pool import TRIES, Sandbox
from posttrain.sandbox.sandbox_types import ProgramLimits, Ran, SandboxBroken
from posttrain.sandbox.sandbox_worker import SandboxWorker
from posttrain.system.concurrency import settled
from posttrain.verifier.code.code_reward import Code
from tests.sandbox.sandbox_parts import backend

LIMITS = ProgramLimits(wall=20.0, cpu=10.0)


@pytest.fixture
def one() -> Iterator[Sandbox]:
    with Sandbox(backend("namespaces"), workers=1, sessions=1, limits=LIMITS) as box:
        box.run_sync("1")
        yield box


async def test_a_cancelled_program_that_had_ended_takes_no_other_with_it(one: Sandbox) -> None:
    first = asyncio.create_task(one.run("import time; time.sleep(0.05)"))
    second = asyncio.create_task(one.run("import time; time.sleep(0.5); print('second')"))
    await asyncio.sleep(0.02)
    # the event loop is busy: the first ends meanwhile, which nobody has heard yet, and the second begins
    time.sleep(0.3)
    first.cancel()
    _, ran = await asyncio.gather(first, second, return_exceptions=True)
    assert isinstance(ran, Ran) and (ran.why, ran.said) == ("ok", "second\n")


async def test_a_program_that_is_cancelled_before_it_is_sent_ends_too(
    one: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = SandboxWorker.settle

    def late(self: SandboxWorker) -> None:
        time.sleep(0.3)  # the program has its sandbox, and does not run yet
        settle(self)

    monkeypatch.setattr(SandboxWorker, "settle", late)
    given_up = asyncio.create_task(one.run("while True: pass"))
    await asyncio.sleep(0.1)
    given_up.cancel()
    start = time.monotonic()
    assert (await one.run("print(1)")).said == "1\n" and time.monotonic() - start < 5.0


@pytest.mark.prove
async def test_siblings_that_are_given_up_cost_no_right_answer() -> None:
    """As dynamic K does it: of twelve verdicts the last four are cancelled, while the event loop has other work."""
    task = Task("t", "q", info={"tests": ["assert f(2) == 4"]})
    with Sandbox(backend("namespaces"), workers=2, limits=LIMITS) as box:
        code = Code(box)

        async def busy() -> None:
            while True:
                time.sleep(0.04)
                await asyncio.sleep(0)

        other = asyncio.create_task(busy())
        sleeps = "import time\ntime.sleep(0.02)\ndef f(x): return x + x"
        for _ in range(2):
            groups = await asyncio.gather(
                *(settled([code.verdict(task, sleeps) for _ in range(12)], 8) for _ in range(4))
            )
            assert [v.score for group in groups for v in group if v is not None] == [1.0] * 32
        other.cancel()


@pytest.mark.prove
async def test_an_ended_session_stops_nobody_elses(one: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = SandboxWorker.stop

    def late(self: SandboxWorker) -> None:
        time.sleep(0.3)  # whoever ends a session loses its turn here
        stop(self)

    monkeypatch.setattr(SandboxWorker, "stop", late)
    first, second = one.session(), one.session()
    assert (await first.run("1 + 1")).said == "2\n"
    waits = asyncio.create_task(second.run("import time; time.sleep(1); 'second'"))
    await asyncio.sleep(0.05)
    await asyncio.to_thread(first.end)
    ran = await waits
    assert (ran.why, ran.said, ran.lost) == ("ok", "'second'\n", False)
    await second.close()


@dataclass
class KilledAtItsStart:
    """A backend whose first sandboxes are killed before they are ready, as by somebody who is short of memory."""

    inner: Backend
    times: int
    name: str = "killed"
    processes: bool = False
    starts: list[str] = field(default_factory=list[str])

    def start(self, control: int, limits: ProgramLimits) -> Start:
        self.starts.append("")
        real = self.inner.start(control, limits)
        killed = replace(real, command=("/bin/sh", "-c", "kill -9 $$"), reports=False)
        return killed if len(self.starts) <= self.times else real


def test_a_session_whose_sandbox_is_killed_at_its_start_gets_another() -> None:
    with Sandbox(KilledAtItsStart(backend("namespaces"), TRIES - 1), workers=1, sessions=1, limits=LIMITS) as box:
        assert box.session().run_sync("print(2)").said == "2\n"
    always = KilledAtItsStart(backend("namespaces"), 10**6)
    with (
        Sandbox(always, workers=1, sessions=1, limits=LIMITS) as box,
        pytest.raises(SandboxBroken, match="killed at its start"),
    ):
        box.session().run_sync("print(2)")
    assert len(always.starts) == TRIES
