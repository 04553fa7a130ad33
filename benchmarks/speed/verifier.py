"""How long judging takes: programs in the sandbox and answers in mathematics, warm and cold, many at once, and what
10,000 leave.

    python -m benchmarks.speed.verifier                        # all of it: some five minutes on 2 cores
    python -m benchmarks.speed.verifier --only small,rate      # pieces; the others keep their place in the results file
    python -m benchmarks.speed.verifier --quick                # few repetitions, nothing written: does it run?

The sandbox is what `auto` chooses here. A latency is that of one question at a time, from the call to the answer, in
the process that asks; the first 20 are warm-up. Beside each stands the CPU time of everything that worked for it (ours,
the sandboxes' from their start on, the programs'), which says what it costs on a quiet machine, and the share of the
cores that other programs took. A sandbox that dies with its one program takes that account with it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.speed.side import machine
from posttrain.core.types import Task
from posttrain.sandbox.choose_backend import choose
from posttrain.sandbox.sandbox_pool import Sandbox
from posttrain.sandbox.sandbox_types import Call, ProgramLimits
from posttrain.sandbox.sandbox_worker import SandboxWorker
from posttrain.verifier.math.math_reward import math_source

RESULTS = Path(__file__).parent / "results" / "verifier.json"
SMALL = "print(sum(range(10)))"
NUMPY = "import numpy as np\nprint(int(np.arange(10).sum()))"
FUNCTION = "def f(xs):\n    return sorted(xs)[-1]"
WARM = 20
LIMITS = ProgramLimits(wall=30.0)
"""Long, so that a busy machine makes a run slow and not wrong."""
TARGETS = {"small": ("p50", "<=", 6.0), "numpy": ("p50", "<=", 8.0), "rate": ("per_second", ">=", 300.0)}
GROWTH_MB = 4.0
"""What counts as no growth: resident memory moves by whole arenas of the allocator."""
ANSWERS = (
    ("1/2", "so \\boxed{\\frac{1}{2}}"),
    ("1000", "that is 1,000"),
    ("4", "\\boxed{3}, no, \\boxed{4}"),
    ("(1, 2)", "\\boxed{(1,2)}"),
    ("12.5", "\\boxed{12.50}"),
    ("7", "I do not know"),
)
"""Settled by our own rules."""
ALGEBRA = (
    ("2\\sqrt{2}", "\\boxed{\\sqrt{8}}"),
    ("\\frac{\\pi}{4}", "\\boxed{\\arctan(1)}"),
    ("x^2-1", "\\boxed{(x-1)(x+1)}"),
)
"""Settled by math-verify in a process of its own."""


BURIED = [0.0]
"""CPU seconds of processes that have been ended: a namespace that is killed tells nobody what it used."""
CLOSE = SandboxWorker.close


def close(worker: SandboxWorker) -> None:
    """Count what a sandbox used before it is ended."""
    BURIED[0] += family(*worker.pids)
    CLOSE(worker)


SandboxWorker.close = close


def sandbox(workers: int, packages: tuple[str, ...] = ("numpy",)) -> Sandbox:
    return Sandbox(choose("auto", packages), workers=workers, limits=LIMITS)


def spent() -> float:
    """CPU seconds of this process, and of those that worked for it and have been counted at their end."""
    return sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) + BURIED[0]


def family(*roots: int) -> float:
    """CPU seconds of these processes (without any: of this one's children) and of all below them, those waited for
    included."""
    below, seconds = set(roots or (os.getpid(),)), 0.0
    found = {p: _stat(p) for p in map(int, filter(str.isdigit, os.listdir("/proc")))}
    while more := {p for p, fields in found.items() if fields and int(fields[1]) in below} - below:
        below |= more
    for process in (below - {os.getpid()}) & {p for p, fields in found.items() if fields}:
        seconds += sum(map(int, found[process][11:15])) / os.sysconf("SC_CLK_TCK")
    return seconds


def _stat(process: int) -> list[str]:
    """What the kernel says about a process, from its state on; nothing where it has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def busy() -> float:
    """CPU seconds all programs of the machine have used."""
    user, nice, system, _, _, irq, soft, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def watched(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `work` found, with the CPU seconds it took and the share of the cores that others had meanwhile.

    `work` ends the processes it starts, so theirs are counted too.
    """
    begun, own, all_before = time.perf_counter(), spent(), busy()
    found = work()
    wall, own, everyone = time.perf_counter() - begun, spent() - own, busy() - all_before
    return found | {
        "seconds": wall,
        "cpu_seconds": own,
        "others": max(0.0, everyone - own) / (wall * (os.cpu_count() or 1)),
    }


def spread(times: Sequence[float]) -> dict[str, Any]:
    """Milliseconds: median, 95th and 99th hundredth, least."""
    cuts = statistics.quantiles(times, n=100)
    return {
        "n": len(times),
        "p50": 1e3 * statistics.median(times),
        "p95": 1e3 * cuts[94],
        "p99": 1e3 * cuts[98],
        "least": 1e3 * min(times),
    }


def timed(ask: Callable[[], bool], count: int) -> list[float]:
    times: list[float] = []
    for i in range(WARM + count):
        begun = time.perf_counter()
        right = ask()
        times.append(time.perf_counter() - begun)
        if not right:
            raise SystemExit(f"question {i} was not answered as it should be")
    return times[WARM:]


def latency(program: str, said: bytes) -> Callable[[int], dict[str, Any]]:
    def piece(count: int) -> dict[str, Any]:
        with sandbox(1) as box:
            ran = []
            times = timed(lambda: ran.append(box.run_sync(program)) or ran[-1].stdout == said, count)
        return spread(times) | {"sandbox": box.name, "program_cpu_ms": 1e3 * statistics.median(r.cpu for r in ran)}

    return piece


def call(count: int) -> dict[str, Any]:
    """A function called with arguments, its value heard as JSON: one test of a task."""
    with sandbox(1) as box:
        times = timed(
            lambda: box.run_sync(FUNCTION, call=Call("f", ([3, 1, 2],))).result == b'{"value": {"int": "0x3"}}', count
        )
    return spread(times)


def session(count: int) -> dict[str, Any]:
    """A piece of a session that lives already."""
    with sandbox(1) as box:
        with_state = box.session()
        times = timed(lambda: with_state.run_sync("6 * 7").stdout == b"42\n", count)
    return spread(times)


def cold(count: int) -> dict[str, Any]:
    """A sandbox that is not there yet: start it, run one program, end it."""

    def one() -> bool:
        with sandbox(1) as box:
            return box.run_sync(SMALL).stdout == b"45\n"

    return spread([t for _ in range(count) for t in _once(one)])


def children(count: int) -> dict[str, Any]:
    """A program that may have children: a sandbox is started for it alone."""
    with sandbox(1, ()) as box:
        limits = ProgramLimits(processes=1, wall=30.0)
        return spread(
            [t for _ in range(count) for t in _once(lambda: box.run_sync(SMALL, limits=limits).stdout == b"45\n")]
        )


def _once(ask: Callable[[], bool]) -> list[float]:
    begun = time.perf_counter()
    assert ask()
    return [time.perf_counter() - begun]


def rate(count: int) -> dict[str, Any]:
    """Executions per second with all cores, asked from one event loop, 64 at a time. Two sandboxes a core: one is
    cleaned and asked while the other runs."""
    workers = 2 * (os.cpu_count() or 1)
    with sandbox(workers, ()) as box:

        async def main() -> float:
            gate = asyncio.Semaphore(64)

            async def one(i: int) -> None:
                async with gate:
                    assert (await box.run("print(input())", stdin=str(i))).stdout == b"%d\n" % i

            await asyncio.gather(*map(one, range(2 * WARM)))
            begun = time.perf_counter()
            await asyncio.gather(*map(one, range(count)))
            return time.perf_counter() - begun

        took = asyncio.run(main())
    return {"n": count, "per_second": count / took, "workers": workers}


def mathematics(answers: Sequence[tuple[str, str]]) -> Callable[[int], dict[str, Any]]:
    def piece(count: int) -> dict[str, Any]:
        source = math_source(workers=1)
        tasks = [(Task(id=str(i), prompt="", answer=gold), said) for i, (gold, said) in enumerate(answers)]
        begun = time.perf_counter()
        source.verdict(*tasks[0])
        first = time.perf_counter() - begun
        times = timed(lambda: all(source.verdict(t, said).score is not None for t, said in tasks), count)
        BURIED[0] += family()
        source.close()
        return spread([t / len(tasks) for t in times]) | {"first_ms": 1e3 * first}

    return piece


def leak(count: int) -> dict[str, Any]:
    """Processes, descriptors and resident bytes around `count` executions, looked at every tenth of them."""
    with sandbox(os.cpu_count() or 1) as box:

        async def batch(many: int) -> None:
            done = await asyncio.gather(*(box.run("print(input())", stdin=str(i)) for i in range(many)))
            assert [int(d.stdout) for d in done] == list(range(many))

        asyncio.run(batch(count // 10))
        looks = [look()]
        for _ in range(10):
            asyncio.run(batch(count // 10))
            looks.append(look())
        started = box.counts.started
        lost = box.counts.lost
    after = look()
    return {"n": count, "looks": looks, "after": after, "sandboxes": started, "lost": lost, "growth_mb": _growth(looks)}


def look() -> dict[str, Any]:
    """Our descriptors, resident bytes, children (zombies are among them) and bytes of shared memory."""
    shared = Path("/dev/shm")
    mine = [p for p in map(int, filter(str.isdigit, os.listdir("/proc"))) if _stat(p)[1:2] == [str(os.getpid())]]
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "resident_mb": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6,
        "children": len(mine),
        "shared_bytes": (
            sum(f.stat().st_size for f in shared.iterdir() if f.is_file() and f.stat().st_uid == os.getuid())
            if shared.is_dir()
            else 0
        ),
    }


def _growth(looks: Sequence[dict[str, Any]]) -> float:
    """Median of the second half over that of the first: a leak of one page a program is 20 MB here."""
    sizes = [x["resident_mb"] for x in looks]
    half = len(sizes) // 2
    return statistics.median(sizes[half:]) - statistics.median(sizes[:half])


PIECES: dict[str, tuple[str, Callable[[int], dict[str, Any]], int, int]] = {
    "small": ("print of a sum", latency(SMALL, b"45\n"), 1000, 30),
    "numpy": ("the same with numpy", latency(NUMPY, b"45\n"), 1000, 30),
    "call": ("a function's value", call, 1000, 30),
    "session": ("a piece of a session", session, 1000, 30),
    "cold": ("start, run, end", cold, 30, 3),
    "children": ("a sandbox for one program", children, 30, 3),
    "rate": ("all cores, 64 at a time", rate, 5000, 100),
    "math": ("answers by our rules", mathematics(ANSWERS), 300, 20),
    "algebra": ("answers by math-verify", mathematics(ALGEBRA), 100, 5),
    "leak": ("what executions leave", leak, 10_000, 200),
}
"""Name -> what it is, how it is measured, repetitions, repetitions with --quick."""


def claims(pieces: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Each target, what was measured, and whether it holds."""
    out: list[dict[str, Any]] = []

    def claim(piece: str, what: str, sign: str, target: float, measured: float) -> None:
        out.append(
            {
                "piece": piece,
                "what": what,
                "sign": sign,
                "target": target,
                "measured": measured,
                "holds": _holds(sign, target, measured),
            }
        )

    for name, (key, sign, target) in TARGETS.items():
        if name in pieces:
            claim(name, {"p50": "median, ms", "per_second": "executions/s"}[key], sign, target, pieces[name][key])
    if "leak" in pieces:
        found = pieces["leak"]
        first, last, after = found["looks"][0], found["looks"][-1], found["after"]
        claim("leak", "descriptors more", "<=", 0, last["descriptors"] - first["descriptors"])
        claim("leak", "children while it runs more", "<=", 0, last["children"] - first["children"])
        claim("leak", "children afterwards", "<=", 0, after["children"])
        claim("leak", "shared memory more, bytes", "<=", 0, after["shared_bytes"] - first["shared_bytes"])
        claim("leak", "resident memory more, MB", "<=", GROWTH_MB, found["growth_mb"])
        claim("leak", "sandboxes lost", "<=", 0, found["lost"])
    return out


def _holds(sign: str, target: float, measured: float) -> bool:
    return measured >= target if sign == ">=" else measured <= target


def show(whole: dict[str, Any]) -> None:
    print(
        "| piece | what | n | p50 ms | p95 ms | p99 ms | executions/s | CPU ms each | others"
        " |\n|---|---|---:|---:|---:|---:|---:|---:|---:|"
    )
    for name, piece in whole["pieces"].items():
        times = [f"{piece[k]:.2f}" if k in piece else "" for k in ("p50", "p95", "p99")]
        many = f"{piece['per_second']:.0f}" if "per_second" in piece else ""
        cpu = "" if piece["cpu_ms_each"] is None else f"{piece['cpu_ms_each']:.2f}"
        print(
            f"| {name} | {PIECES[name][0]} | {piece['n']:,} | {' | '.join(times)} | {many} | {cpu} |"
            f" {piece['others']:.0%} |"
        )
    print("\n| claim | target | measured | holds |\n|---|---:|---:|---|")
    for c in whole["claims"]:
        print(
            f"| {c['piece']}: {c['what']} | {c['sign']} {c['target']:g} | {c['measured']:.4g} |"
            f" {'yes' if c['holds'] else 'NO'} |"
        )


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda s: s.split(","), default=list(PIECES), help=f"pieces: {','.join(PIECES)}")
    parser.add_argument("--quick", action="store_true", help="few repetitions; writes nothing")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help=f"results file (default: {RESULTS.name} beside the others)"
    )
    args = parser.parse_args(argv)
    if unknown := [n for n in args.only if n not in PIECES]:
        parser.error(f"no piece {unknown[0]!r}; there are {', '.join(PIECES)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    before = json.loads(args.out.read_text())["pieces"] if not args.quick and args.out.exists() else {}
    found: dict[str, Any] = {}
    for name in args.only:
        _, work, many, few = PIECES[name]
        count = few if args.quick else many
        piece = watched(lambda work=work, count=count: work(count))
        asked = len(ANSWERS if name == "math" else ALGEBRA if name == "algebra" else "1")
        piece["cpu_ms_each"] = None if name == "children" else 1e3 * piece["cpu_seconds"] / (asked * piece["n"])
        found[name] = piece | {
            "date": date.today().isoformat(),
            "machine": machine(1),
            "python": sys.version.split()[0],
        }
    pieces = {name: (before | found)[name] for name in PIECES if name in before | found}
    whole = {"pieces": pieces, "claims": claims(pieces)}
    if not args.quick:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(whole, indent=1) + "\n")
    show(whole)
    return 0


if __name__ == "__main__":
    sys.exit(main())
