"""Page 20: what the cache of keys and values takes, and what a decoding step then waits for."""

from __future__ import annotations

from posttrain.lab import lesson as lab
from posttrain.plan.machines import device
from posttrain.plan.models import shape_by_name
from posttrain.plan.serving import Decoding
from posttrain.web.picture import Bars, Curve

MODELS = ("Qwen2.5-7B", "Llama-3.1-8B", "Llama-3.1-70B", "Qwen3-30B-A3B", "DeepSeek-V3")
COUNTS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]


def decoding(k: lab.Values, **other: int) -> Decoding:
    """Decoding at the knobs `k` with some of them replaced by `other`."""
    sizes = {name: int({**k, **other}[name]) for name in ("devices", "sequences", "length")}
    return Decoding(shape_by_name(k["model"]), device("H100"), **sizes, shared=bool(k["shared"]))


def compute(k: lab.Values) -> lab.Readout:
    now = decoding(k)
    by_count = [decoding(k, sequences=n) for n in COUNTS]
    fitting = [s.tokens_per_second if s.bound != "memory" else None for s in by_count]
    beyond = [s.tokens_per_second if s.bound == "memory" else None for s in by_count]
    bound_words = {"memory": "The rest would have to wait; with room for all,",
                   "bandwidth": "A step waits for **reading**:",
                   "arithmetic": "A step waits for **arithmetic**:"}  # fmt: skip
    return lab.Readout(
        pictures=(
            Bars("Memory, GB", ["weights", "caches", "devices"],
                 {"GB": [now.weights / 1e9, now.cache / 1e9, now.memory / 1e9]}, low=0),
            Bars("One step takes the longer of the two, ms", ["reading", "arithmetic"],
                 {"ms": [now.reading * 1e3, now.arithmetic * 1e3]}, low=0),
            Curve("Tokens a second of all sequences together", COUNTS, {"fits": fitting, "does not fit": beyond},
                  x_label="sequences at once", low=0, log=True, at=float(k["sequences"])),
        ),
        sentence=f"A token's keys and values take **{now.token_cache / 1e3:.0f} KB**, all caches "
        f"**{now.cache / 1e9:.3g} GB** beside **{now.weights / 1e9:.3g} GB** of weights; **{now.fitting}** such "
        f"sequences fit. {bound_words[now.bound]} at the peaks of the devices that is **{now.tokens_per_second:.0f}** "
        f"tokens a second, **{now.tokens_per_second / now.sequences:.0f}** for each reader.",
        values={"KB a token": now.token_cache / 1e3, "caches, GB": now.cache / 1e9, "reading, ms": now.reading * 1e3,
                "arithmetic, ms": now.arithmetic * 1e3, "sequences that fit": now.fitting,
                "tokens a second": now.tokens_per_second},
    )  # fmt: skip


def kilobytes(model: str, shared: bool = True) -> float:
    """KB of one token's keys and values."""
    return decoding({"model": model, "devices": 1, "sequences": 1, "length": 1, "shared": shared}).token_cache / 1e3


LESSON = lab.Lesson(
    number="20", name="cache", title="The KV cache: capacity or bandwidth", part="the engineer", force="cost",
    minutes=6,
    question="Why does an engine run out of memory, or of speed, long before it runs out of arithmetic?",
    idea="""
        To say the next token, attention reads the keys and values of all earlier tokens. They are kept in a *cache*, so
        that nothing is computed twice. A cache grows by the same bytes with every token of every sequence.

        So there are three limits. *Capacity*: weights and caches must fit. *Bandwidth*: a step reads the weights once
        for all sequences, and the cache of each. *Arithmetic*: it grows with the sequences. More sequences share the
        reading of the weights, until their caches are most of what is read.

        A model makes the cache small by sharing. With GQA several query heads read the same keys and values; with MLA
        (DeepSeek) all heads unfold one short vector. Engines share the blocks of a common prompt too (page 21).
    """,
    formula="bytes a token = 2 * layers * key heads * width of a head * 2        step = max( bytes / bandwidth, "
    "operations / arithmetic )",
    knobs=(
        lab.Options("model", "model", "Llama-3.1-8B", MODELS),
        lab.Slider("devices", "H100", 1, 1, 64, log=True),
        lab.Slider("sequences", "sequences at once", 32, 1, 1024, log=True),
        lab.Slider("length", "tokens of each", 2048, 128, 131072, log=True),
        lab.Toggle("shared", "share keys and values (GQA, MLA)", True),
    ),
    compute=compute,
    breaks=(
        lab.Break({"model": "Llama-3.1-70B", "devices": 8, "sequences": 256, "length": 8192},
                  "The caches are five times as large as the weights, and 71 sequences wait until others end.", None,
                  "many long sequences"),
        lab.Break({"shared": False, "sequences": 128, "length": 4096},
                  "The same model with a key head for each query head: four times the cache, and a quarter "
                  "of the sequences.", None, "nothing is shared"),
    ),
    claims=(
        lab.Claim("Llama-3-8B, KB a token", "curriculum 20", 131, lambda: kilobytes("Llama-3.1-8B")),
        lab.Claim("Llama-3-70B, KB a token", "curriculum 20", 328, lambda: kilobytes("Llama-3.1-70B")),
        lab.Claim("Qwen-2.5-7B, KB a token", "curriculum 20", 57, lambda: kilobytes("Qwen2.5-7B")),
        lab.Claim("Without GQA, 8B, KB a token", "curriculum 20", 524, lambda: kilobytes("Llama-3.1-8B", False)),
        lab.Claim("Without GQA, 70B, KB a token", "curriculum 20", 2600, lambda: kilobytes("Llama-3.1-70B", False)),
        lab.Claim("256 sequences of 8k tokens at 70B, GB", "curriculum 20", 670,
                  lambda: kilobytes("Llama-3.1-70B") * 256 * 8000 / 1e6,
                  why="8k read as 8,000 tokens gives 671; as 8,192 it is 687."),
    ),
    exercises=(
        lab.AskNumber("28 layers, 4 key heads of width 128, and 2 bytes a number: how many KB does a token take?",
                      57.3, why="2 * 28 * 4 * 128 * 2 = 57,344 bytes."),
        lab.AskKnobs("Serve Llama-3.1-70B so that 256 sequences of 2,048 tokens fit: at least 256.",
                     "sequences that fit", 256, None, {"model": "Llama-3.1-70B", "devices": 8, "length": 2048}),
        lab.AskChoice("With Llama-3.1-8B a step of 32 short sequences takes little longer than a step of one. Why?",
                      ("The weights are read once for all of them", "Short sequences need no cache",
                      "Arithmetic does not grow"), 0,
                      why="Reading the weights is most of a step while the caches are small."),
    ),
    code=("posttrain.plan.serving.Decoding", "posttrain.plan.shapes.ModelShape"),
    docs="design/engine.md", command="posttrain run arithmetic slots=32", grid=("model", "sequences"),
)  # fmt: skip
