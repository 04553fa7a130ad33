"""Page 22: what fills the memory of a device, at which instant of a step, and what to change."""

from __future__ import annotations

from posttrain.lab import lesson as lab
from posttrain.plan import activations
from posttrain.plan.counted import quoted
from posttrain.plan.lengths import Lengths
from posttrain.plan.machines import device
from posttrain.plan.memory import INSTANTS, places
from posttrain.plan.models import shape_by_name
from posttrain.plan.work import Work
from posttrain.web.picture import Bars

MODELS = ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-7B", "Qwen2.5-14B", "Llama-3.1-70B")
PROMPT, SIBLINGS = 256, 8
ROOM = device("H100").memory


def work(k: lab.Values) -> Work:
    """GRPO in bfloat16 with a reference: `batch` sequences of `length` tokens in a pass, 64 of them in a step, all of
    one length. 256 tokens of a sequence are its prompt."""
    answer = int(k["length"]) - PROMPT
    return Work(
        shape=shape_by_name(k["model"]),
        lengths=Lengths(prompt=PROMPT, mean=answer, most=answer),
        prompts=8, siblings=SIBLINGS, micro_tokens=int(k["batch"]) * int(k["length"]), width=2, accelerator=True,
        samples_answers=True, reference=True, checkpointing=k["again"], ranks=int(k["devices"]), slots=64,
    )  # fmt: skip


def compute(k: lab.Values) -> lab.Readout:
    place = places(work(k))[0]  # the process of learner and engine: here they share one
    terms = [t for t in place.held(place.peak) if t.bytes > 0.01 * place.most]  # large enough to be seen
    fits = place.most <= ROOM
    usual = quoted(shape_by_name(k["model"]).parameters) / int(k["devices"])
    verdict = "It fits." if fits else "It **does not fit** into 80 GB."
    return lab.Readout(
        pictures=(
            Bars("Memory of the fullest H100 at each instant of a step, GB", INSTANTS,
                 {"GB": [place.total(i) / 1e9 for i in INSTANTS]}, low=0, marks={"an H100:": ROOM / 1e9}),
            Bars(f"What is there at its highest ({place.peak}), GB", [t.name for t in terms],
                 {"GB": [t.bytes / 1e9 for t in terms]}, low=0),
        ),
        sentence=f"The peak is **{place.most / 1e9:.3g} GB**, at **{place.peak}**; the largest part is the "
        f"{terms[0].name}, **{terms[0].bytes / 1e9:.3g} GB**. {verdict} The usual count of 18 bytes a parameter says "
        f"{usual / 1e9:.3g} GB a device, and knows no activations, engine or reference.",
        values={"peak, GB": place.most / 1e9, "18 bytes a parameter, GB": usual / 1e9,
                "cache, GB": next(t.bytes for t in place.terms if t.name.startswith("cache")) / 1e9,
                "activations, GB": next(t.bytes for t in place.terms if t.name == "activations") / 1e9},
    )  # fmt: skip


def of_layers() -> float:
    """GB that 4 sequences of 8,192 tokens keep in a model of 7 B, by the layers of Qwen2.5-7B."""
    setting = work({"model": "Qwen2.5-7B", "length": 8192, "batch": 4, "again": "none", "devices": 1})
    return activations.kept(setting) * 4 * 8192 / 1e9


LESSON = lab.Lesson(
    number="22", name="memory", title="Memory: does it fit?", part="the engineer", force="cost", minutes=7,
    question="What fills a GPU in a step of reinforcement learning, and at which moment?",
    idea="""
        Training keeps four things for every parameter: the weight, its gradient, and two *moments* of AdamW; in
        bfloat16 also a float32 copy. RL adds two copies of the weights: one that samples, one that is compared with.

        The rest comes and goes. While the policy samples, the cache of keys and values is full. In the forward pass
        each layer leaves *activations* for the backward pass; checkpointing throws them away and computes them again.

        So there is no single number. A plan adds what is always there to the fullest *instant* of a step. Over several
        devices each holds its rows of weights, gradients and moments, and brings one layer together at a time. The
        engine that samples is whole, on the first of them.
    """,
    formula="peak = what always is there + max over instants( what is there then )",
    knobs=(
        lab.Options("model", "model", "Qwen2.5-1.5B", MODELS),
        lab.Slider("length", "tokens of a sequence", 2048, 512, 32768, log=True),
        lab.Slider("batch", "sequences in a pass", 4, 1, 32, log=True),
        lab.Slider("devices", "H100 that train together", 1, 1, 64, log=True),
        lab.Options("again", "computed again", "none", ("none", "selective", "full")),
    ),
    compute=compute,
    breaks=(
        lab.Break({"model": "Llama-3.1-70B", "devices": 8, "again": "full"},
              "Eight H100 have 640 GB, and weights, gradients and moments alone take more.", None, "70 B on 8 H100"),
        lab.Break({"length": 32768, "batch": 4},
                  "The same model with long sequences: activations are most of the memory. Compute them again.",
                  None, "long sequences"),
    ),
    claims=(
        lab.Claim("7 B, 18 bytes a parameter, GB", "curriculum 22", 126, lambda: quoted(7e9) / 1e9),
        lab.Claim("70 B, GB", "curriculum 22", 1260, lambda: quoted(70e9) / 1e9),
        lab.Claim("405 B, GB", "curriculum 22", 7300, lambda: quoted(405e9) / 1e9),
        lab.Claim("activations of 7 B, 4 sequences of 8,192, GB", "curriculum 22", 137, of_layers,
              why="137 is 32 bytes for each number of the hidden state and layer (32 layers of 4,096); the layers of "
              "Qwen2.5-7B, as they are computed here, keep more for each of fewer numbers."),
        lab.Claim("70 B colocated on 8 H100 of 640 GB: GB that are needed", "curriculum 24", 640,
                  lambda: quoted(70e9) / 1e9, why="1,260 GB do not fit into 640."),
    ),
    exercises=(
        lab.AskNumber("A model has 7 billion parameters. How many GB take AdamW's two moments in float32?", 56,
                      why="2 moments of 4 bytes are 8 bytes a parameter."),
        lab.AskKnobs("Bring the peak to at most 45 GB with the same model, length and device.", "peak, GB", None, 45,
                     {"again": "full"}),
        lab.AskChoice("A step plays twice as many prompts. What happens to the learner's peak?",
                      ("Nothing: a step is cut into passes", "It doubles", "Only the moments grow"), 0,
                      why="A pass has as many tokens as before; there are more passes."),
    ),
    code=("posttrain.plan.memory.places", "posttrain.plan.activations.kept", "posttrain.plan.counted.quoted"),
    docs="guides/planning.md", command="posttrain plan grpo model=Qwen2.5-7B machine=8xH100", grid=("model", "devices"),
)  # fmt: skip
