"""What a run over ranks refuses before it starts, and the files that its ranks write: any other number reads them."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from posttrain.config.engines import VLLM
from posttrain.config.model_settings import Lora
from posttrain.config.rank_limits import TORCHRUN, RankOptions, check_ranks
from posttrain.config.run import Optimizer, Run
from posttrain.config.stages.rejection import Rejection
from posttrain.core.exchange.ranks import ALONE, of_every
from posttrain.core.exchange.shards import Shard
from posttrain.engine.learner.learner import FrozenScorer
from posttrain.engine.parallel import tensor_parallel
from posttrain.engine.parallel.ranks.rank_orders import RankLost, met
from posttrain.engine.parallel.ranks.rank_processes import RankProcesses
from posttrain.engine.parallel.ranks.signed_messages import users_key
from posttrain.engine.parallel.sharded_learner import ShardedLearner
from posttrain.engine.parallel.sharded_reference import ShardedReference
from posttrain.engine.parallel.tensor_parallel import TensorLearner
from posttrain.role.weights.saved_weights import SavedTensors, part_files, write_part
from posttrain.stages.ranks.lead_learner import OrderedLearner
from posttrain.stages.ranks.rank_lead import LeadReference
from posttrain.system.errors import ConfigError, InvariantError, RunFolderError
from tests.meeting import exchange
from tests.tiny import MODEL, tiny_run

TWO = RankOptions(nproc=2)


def changed(**model: object) -> Callable[[Run], Run]:
    return lambda run: replace(run, model=replace(MODEL, **model))


def optimizer(kind: str) -> Callable[[Run], Run]:
    def change(run: Run) -> Run:
        stage = replace(run.stages[-1], optimizer=Optimizer(kind=kind))  # type: ignore[arg-type]
        return replace(run, stages=(stage,))

    return change


REFUSED: dict[str, Callable[[Run], Run]] = {
    "model.quantize": changed(lora=Lora(rank=2), quantize="int8"),
    "model.compile=true": changed(compile=True),
    "model.warm_up=true": changed(warm_up=True),
    "exact=true": lambda run: replace(run, exact=True),
    "vLLM in this process": lambda run: replace(run, engine=VLLM(), exact=False),
    "optimizer.kind=muon": optimizer("muon"),
    "optimizer.kind=adamw8bit": optimizer("adamw8bit"),
    "stage 'best' (Rejection)": lambda run: replace(run, stages=(Rejection(name="best"),)),
}


COLUMNS: dict[str, Callable[[Run], Run]] = {
    "model.lora is set": changed(lora=Lora(rank=2)),
    "Set model.dtype=float32": changed(dtype="bfloat16"),
}


@pytest.mark.parametrize("words", COLUMNS)
def test_what_columns_and_rows_cannot_do_is_refused_by_name(words: str) -> None:
    run = COLUMNS[words](tiny_run())
    check_ranks(run, TWO)
    with pytest.raises(ConfigError, match="--parallel tensor") as found:
        check_ranks(run, RankOptions(nproc=2, parallel="tensor"))
    assert words in str(found.value)


def test_copies_are_of_rows_alone() -> None:
    with pytest.raises(ConfigError, match="Leave out --replicas"):
        RankOptions(nproc=4, replicas=2, parallel="tensor")
    with pytest.raises(ConfigError, match="--parallel pipeline: must be one of rows, tensor"):
        RankOptions(nproc=4, parallel="pipeline")  # type: ignore[arg-type]


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_not_built_is_refused_by_name(words: str) -> None:
    run = REFUSED[words](tiny_run())
    check_ranks(run, RankOptions())
    with pytest.raises(ConfigError, match="over ranks") as found:
        check_ranks(run, TWO)
    assert words in str(found.value)
    check_ranks(tiny_run(), TWO)


def test_numbers_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ({"nproc": 0}, {"nproc": 2, "seconds": 0.0}, {"nproc": 4, "replicas": 3}, {"replicas": 2}):
        with pytest.raises(ConfigError):
            RankOptions(**wrong)  # type: ignore[arg-type]
    assert (RankOptions().world, TWO.world) == (None, 2)
    for name, value in ((TORCHRUN, "mine"), ("RANK", "1"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    assert RankOptions().world == 4
    with pytest.raises(ConfigError, match="torchrun has started 4"):
        RankOptions(nproc=2)


class Two:
    """Two ranks, of which the first one has found no error."""

    world = 2

    def every(self, own: Any) -> list[Any]:
        return [(3, 0, ""), own]


def test_a_value_of_every_rank() -> None:
    assert of_every(ALONE, lambda: 3) == [3] and of_every(cast("Any", Two()), lambda: 4) == [3, 4]


# --- files ------------------------------------------------------------------------------------------------------------

WHOLE = {"w": torch.arange(21.0).view(7, 3), "one": torch.tensor([5.0]), "steps": torch.tensor(4), "b": torch.arange(3)}


def rows(tensor: torch.Tensor, rank: int, world: int) -> tuple[torch.Tensor, tuple[int, ...]]:
    if not tensor.ndim:
        return tensor, ()
    each = -(-len(tensor) // world)
    begin = min(len(tensor), rank * each)
    return tensor[begin : begin + each], (begin, *[0] * (tensor.ndim - 1))


def written(folder: Path, world: int) -> Path:
    folder.mkdir()
    for rank in range(world):
        cut = {n: rows(t, rank, world) for n, t in WHOLE.items()}
        shards = [Shard(n, own, tuple(WHOLE[n].shape), at) for n, (own, at) in cut.items()]
        write_part(folder / "weights.safetensors", shards, rank, world)
    return folder / "weights.safetensors"


@pytest.mark.parametrize("wrote", [1, 2, 3, 4, 8])
def test_parts_are_read_by_any_number(wrote: int, tmp_path: Path) -> None:
    saved = SavedTensors(written(tmp_path / "saved", wrote))
    assert len(part_files(saved.path)) == wrote
    assert {n: tuple(t.shape) for n, t in WHOLE.items()} == saved.shapes
    assert all(torch.equal(t, WHOLE[n]) and t.dtype == WHOLE[n].dtype for n, t in saved.whole().items())
    for reads in (1, 2, 3, 4, 8):
        for rank in range(reads):
            for name, tensor in WHOLE.items():
                own, at = rows(tensor, rank, reads)
                assert torch.equal(saved.box(name, at, tuple(own.shape)), own)


def test_parts_that_are_missing_or_damaged(tmp_path: Path) -> None:
    path = written(tmp_path / "saved", 3)
    parts = part_files(path)
    kept = parts[1].read_bytes()
    parts[1].unlink()
    with pytest.raises(RunFolderError, match="2 of the 3 parts"):
        SavedTensors(path)
    parts[1].write_bytes(kept[: len(kept) // 2])
    with pytest.raises(RunFolderError, match="damaged"):
        SavedTensors(path)
    write_part(path, [Shard("w", WHOLE["w"][:1], (8, 3), (3, 0))], 1, 3)
    with pytest.raises(RunFolderError, match="damaged"):
        SavedTensors(path)
    with pytest.raises(RunFolderError):
        SavedTensors(tmp_path / "nothing.safetensors")
    write_part(path, [Shard("w", WHOLE["w"][:1], (7, 3), (3, 0))], 1, 3)
    with pytest.raises(RunFolderError, match="numbers of 'w' are there"):
        SavedTensors(path).tensor("w")


def test_rank_0_orders_whatever_reads_whole_weights() -> None:
    """A method of the learner over ranks that somebody adds is one of rank 0 too: alone it would wait for ever."""
    codes = {n: getattr(f, "__code__", None) for n, f in vars(ShardedLearner).items()}
    read = {n for n, code in codes.items() if code is not None and "divided" in code.co_names} - {"_shared"}
    assert {"score", "packed_score", "entropy"} <= read
    assert read | {"shards", "fingerprint", "forward", "adapter"} <= vars(OrderedLearner).keys()
    kept = {n for n in dir(FrozenScorer) if not n.startswith("_")}
    assert {"score", "fingerprint"} <= kept <= {*dir(LeadReference)} & {*dir(ShardedReference)}


@pytest.mark.parametrize("kind", [InvariantError, RunFolderError])
def test_an_error_of_one_rank_is_raised_on_every_one(kind: type[Exception]) -> None:
    def fails() -> None:
        raise kind("of another model")

    with pytest.raises(kind, match="rank 1: of another model"):
        of_every(cast("Any", Two()), fails)


@pytest.mark.parametrize("apart", [[0.0, 1.0], [0.0, math.nan], [0.0, math.inf, 0.0]])
def test_gradients_that_differ_over_ranks_stop_the_run(apart: list[float]) -> None:
    """Also where one rank's is no number; where the first one's is not, the optimizer tells of it."""
    told: Any = TensorLearner._of_one_way
    told(None, 1.0, [0.0, 1e-9])
    told(None, math.nan, apart)
    with pytest.raises(InvariantError, match="that of rank 1 is"):
        told(None, 1.0, apart)


# --- ranks meet -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how", ["gather", *(pytest.param(x, marks=pytest.mark.prove) for x in ("every", "broadcast", "scatter"))]
)
def test_no_pickle_is_read_that_was_not_signed_with_the_key_of_the_ranks(how: str, tmp_path: Path) -> None:
    """In each way in which torch sends one: whoever reaches its ports could have written it."""
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=exchange, args=(r, tmp_path, f"{r}" * 32, how)) for r in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert "was not signed with the key of these ranks" in (tmp_path / "told-0").read_text()
    assert not (tmp_path / "called").exists()


def test_the_key_of_a_users_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made once, is nobody else's to read, and is refused where it could be known."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = tmp_path / "posttrain" / "ranks.key"
    found = users_key()
    assert found == users_key() == path.read_bytes() and path.stat().st_mode & 0o777 == 0o600 and len(found) >= 32
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        users_key()
    monkeypatch.setenv("POSTTRAIN_RANKS_KEY", "short")
    with pytest.raises(ConfigError, match="at least 32"):
        users_key()


@contextmanager
def meeting(world: int, replicas: int = 1, seconds: float = 600.0, **how: Any) -> Iterator[tuple[RankProcesses, Any]]:
    made = RankProcesses(world, "tests.meeting", 1, seconds, {"replicas": replicas, **how})
    try:
        yield made, met(made.store, 0, world, seconds, replicas, key=made.key, local=True, gone=made.gone)
    finally:
        made.close(kill=True)


@pytest.mark.parametrize(
    ("world", "replicas", "after"),
    [(2, 1, 0), *(pytest.param(*x, marks=pytest.mark.prove) for x in ((3, 1, 1), (4, 2, 3)))],
)
def test_a_rank_that_dies_while_the_others_connect_is_told_at_once(world: int, replicas: int, after: int) -> None:
    """Before it says that it is there, or where it listens, for all ranks or for those of a copy; the time-out is ten
    minutes."""
    with meeting(world, replicas, hangs=False, after=after) as (_, met_by_all):
        begun = time.monotonic()
        with pytest.raises(RankLost, match=r"rank \d is gone: it was killed by SIGKILL"), met_by_all:
            pass
        assert time.monotonic() - begun < 30


def test_a_signal_is_heard_while_ranks_meet_and_nobody_else_meets_them() -> None:
    """SIGTERM comes through while one of them hangs; what listens does so at the loopback address alone, and where they
    meet lies in a folder of the user's own."""

    def stop(number: int, frame: Any) -> None:
        heard.append(listening(os.getpid()))
        raise KeyboardInterrupt

    heard, before = list[list[str]](), signal.signal(signal.SIGALRM, stop)
    try:
        with meeting(2, hangs=True, after=9) as (made, met_by_all):
            assert made.folder.stat().st_mode & 0o777 == 0o700
            signal.setitimer(signal.ITIMER_REAL, 1.0)
            with pytest.raises(KeyboardInterrupt), met_by_all:
                pass
    finally:
        signal.signal(signal.SIGALRM, before)
    assert heard and all(address == "127.0.0.1" for address in heard[0])


def listening(pid: int) -> list[str]:
    """Addresses at which a process listens (Linux; elsewhere none is known)."""
    found, own = list[str](), set[str]()
    for fd in Path(f"/proc/{pid}/fd").glob("*"):
        with suppress(OSError):
            own.add(os.readlink(fd))
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                    raw = bytes.fromhex(fields[1].partition(":")[0])
                    found.append(socket.inet_ntoa(raw[::-1]) if table == "tcp" else raw.hex())
    return found


def test_a_rank_that_a_signal_without_a_name_ended_is_told(tmp_path: Path) -> None:
    made = RankProcesses.__new__(RankProcesses)
    made._processes, made.folder = {1: cast("Any", SimpleNamespace(poll=lambda: -40))}, tmp_path
    assert made.gone() == "rank 1 is gone: it was killed by signal 40"


def test_the_norm_over_columns_and_rows_is_infinite_where_its_square_is() -> None:
    learner: Any = TensorLearner.__new__(TensorLearner)
    learner.holders, learner._held = SimpleNamespace(every=lambda value: [value, value]), {"w": torch.zeros(1)}
    assert learner.norm({"w": torch.full((2,), 3.0)}) == pytest.approx(18**0.5)
    assert learner.norm({"w": torch.full((1,), 1e200, dtype=torch.float64)}) == math.inf


def test_the_heads_that_ranks_cannot_share_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parallel, "check_can_be_cut", lambda *given: None)
    config = SimpleNamespace(base_model_tp_plan={"layers.*.q": "colwise"}, num_attention_heads=12)
    module = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda decoder: config))
    with pytest.raises(ConfigError, match="5 ranks cannot share 12 heads"):
        tensor_parallel.columns_and_rows(cast("Any", SimpleNamespace(module=module)), 5)
