"""What a push of weights costs: bytes and milliseconds by transport and by operation, whole and as deltas.

    python -m benchmarks.speed.weight_sync                # 1 M and 26 M parameters, some minutes
    python -m benchmarks.speed.weight_sync --only 1m --steps 4 --dry

A Qwen3 model learns for some steps with AdamW at a learning rate of 1e-6 (loss: random tokens), with float32 weights as
masters. Each version then goes by each transport to one engine in another process, which checks every tensor and copies
it over the weights of its own module. Both processes have one thread.

gather, cast, reshard, transfer, announce   in the learner's process (`ParcelSender.clock`); reshard has the checksums
                                            and the encoding of deltas
read, install                               in the engine's: read has decoding and checksums
push                                        from the call of publish until the engine answers

Times are the medians of the pushes after the first two. Writes benchmarks/speed/results/weight_sync.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.speed.grpo_work import SIZES, save_checkpoint
from benchmarks.speed.side import machine
from posttrain.engine.embedded.load_weights import replace_weights
from posttrain.engine.model.policy_model import served_tensors
from posttrain.engine.transfer.collective import CollectiveCarrier
from posttrain.engine.transfer.parcel import Carrier
from posttrain.engine.transfer.receiver import ParcelReceiver
from posttrain.engine.transfer.sender import ParcelSender
from posttrain.engine.transfer.shared_folder import FolderCarrier
from posttrain.engine.transfer.shared_memory import SharedCarrier

RESULTS = Path(__file__).parent / "results" / "weight_sync.json"
PAGE = Path(__file__).parents[2] / "docs/design/weight-sync.md"
BEGIN, END = "<!-- measured by benchmarks/speed/weight_sync.py -->\n", "<!-- end of table -->\n"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
TRANSPORTS = ("shared", "file", "collective")
LR, TOKENS = 1e-6, (4, 32)
TIMES = ("gather", "cast", "reshard", "transfer", "announce", "read", "install", "push")
Version = dict[str, Tensor]


@dataclass(frozen=True)
class PushRow:
    """One way to send one model. Times in milliseconds."""

    size: str
    dtype: str
    transport: str
    form: str
    """`whole`, or `delta`."""
    parameters: int
    mb: float
    """Megabytes of a push."""
    share: float
    """Of the bytes of a whole version."""
    gather: float
    cast: float
    reshard: float
    transfer: float
    announce: float
    read: float
    install: float
    push: float


def versions(checkpoint: Path, steps: int) -> Iterator[Version]:
    """The float32 weights before and after each step."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    draws = torch.Generator().manual_seed(0)
    for _ in range(steps + 1):
        yield {n: t.detach().clone() for n, t in served_tensors(model)}
        ids = torch.randint(0, model.config.vocab_size, TOKENS, generator=draws)
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def engine(link: Connection, checkpoint: str) -> None:
    """The other process: serves a module in the dtype it is told, and answers how long each push took it."""
    torch.set_num_threads(1)
    link.send("ready")
    while (told := link.recv()) is not None:
        module = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=DTYPES[told])
        receiver = ParcelReceiver()
        link.send("ready")
        while (parcel := link.recv()) is not None:
            begun = time.perf_counter()
            tensors = receiver.read(parcel)
            read = time.perf_counter()
            replace_weights(module, tensors)
            link.send({"read": read - begun, "install": time.perf_counter() - read})
            del tensors


def arm(
    size: str, dtype: str, transport: str, form: str, given: Sequence[Version], link: Connection, folder: Path
) -> PushRow:
    """Send all versions by one transport to the engine at the other end of `link`."""
    carrier: Carrier = {
        "shared": SharedCarrier,
        "file": lambda: FolderCarrier(folder / "weights"),
        "collective": lambda: CollectiveCarrier(1),
    }[transport]()
    link.send(dtype)
    assert link.recv() == "ready"
    pushes = list[dict[str, float]]()
    with closing(ParcelSender(carrier, DTYPES[dtype], deltas=form == "delta")) as sender:
        for number, weights in enumerate(given):
            begun = time.perf_counter()
            parcel = sender.publish(number, weights.items())
            link.send(parcel)
            told: dict[str, float] = link.recv()
            push = time.perf_counter() - begun
            sender.retire(number)
            spent = {name.removeprefix("sync/"): s for name, s in sender.clock().items()}
            spent["announce"] = spent.pop("install")
            pushes.append({**spent, **told, "push": push, "bytes": parcel.size})
    link.send(None)
    later = pushes[2:]
    size_of = statistics.median(p["bytes"] for p in later)
    numbers = sum(t.numel() for t in given[0].values())
    return PushRow(
        *(size, dtype, transport, form, numbers, size_of / 1e6, size_of / pushes[0]["bytes"]),
        **{name: 1e3 * statistics.median(p[name] for p in later) for name in TIMES},
    )


def measure(sizes: Sequence[str], steps: int) -> list[PushRow]:
    rows = list[PushRow]()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        for size in sizes:
            checkpoint = Path(name) / size
            save_checkpoint(SIZES[size], checkpoint)
            given = list(versions(checkpoint, steps))
            ours, theirs = context.Pipe()
            process = context.Process(target=engine, args=(theirs, str(checkpoint)), daemon=True)
            process.start()
            theirs.close()
            assert ours.recv() == "ready"
            for dtype in DTYPES:
                for transport in TRANSPORTS:
                    for form in ("whole", "delta"):
                        row = arm(size, dtype, transport, form, given, ours, Path(name))
                        print(line(row), flush=True)
                        rows.append(row)
            ours.send(None)
            process.join()
    return rows


def line(row: PushRow) -> str:
    spent = [f"{getattr(row, name):.1f}" for name in TIMES]
    words = [row.size, row.dtype, row.transport, row.form, f"{row.mb:.2f}", f"{100 * row.share:.2f}", *spent]
    return "| " + " | ".join(words) + " |"


def table(rows: Sequence[PushRow]) -> str:
    head = ("size", "served as", "transport", "form", "MB", "share %", *TIMES)
    return "\n".join(
        ["| " + " | ".join(head) + " |", "|" + "---|" * 4 + "---:|" * (len(head) - 4), *(line(r) for r in rows)]
    )


def measured_text(steps: int, beside: str) -> str:
    """What the table is, in a sentence."""
    lines = (
        "",
        f"A Qwen3 under AdamW at a learning rate of {LR:g}, medians of {steps - 1} pushes, {date.today()}, two cores,",
        "one thread a process. Size is in parameters, times are in ms. *reshard* has the checksums and the encoding",
        "of deltas, *read* the checksums and the decoding, *install* is the engine's copy into its module, *push* is",
        "all of it.",
        *([f"Measured beside {beside}: bytes are exact, times are upper bounds."] if beside else []),
        "",
        "",
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SIZES), help="sizes, such as 1m")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps, and pushes after the first")
    parser.add_argument("--beside", default="", help="what else ran on the machine, for the page")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure([s for s in given.only.split(",") if s], given.steps)
    print("\n" + table(rows))
    if not given.dry:
        page = PAGE.read_text()
        before, rest = page.split(BEGIN)
        PAGE.write_text(
            f"{before}{BEGIN}{measured_text(given.steps, given.beside)}{table(rows)}\n{END}{rest.split(END)[1]}"
        )
        about: dict[str, Any] = {"date": str(date.today()), "machine": machine(1), "lr": LR, "steps": given.steps}
        about |= {"beside": given.beside}
        RESULTS.write_text(json.dumps(about | {"rows": [asdict(r) for r in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
