"""A real verl run under `rltrace exec`, made offline, and its figures beside verl's own.

Usage: verl_run.py OUT [--shape tiny|1.7b|8b] [--gpus N] [--steps N] [--v1] [--pairs N [--bare]] [--allocations STEPS]
                   [--long] [--packed] [--samples N] [--sglang] [--critic] [--limit SECONDS] [SETTING=VALUE...]

Prints, per step, verl's `timing_s/*` from its log and what the Recording gives for the same: `ray.dispatch`, the
slowest rank's `ray.call` and `ray.collect`; the bytes of every sync; and how the ledger of each GPU adds up. With
`--pairs` one step of each pair is not recorded, and verl's own figure of the steps says what recording costs; with
`--bare` the same steps run without rltrace, and what verl says of them is printed. `--long` makes steps that wait for
the GPUs and not for Python: 512 tokens a response, 9,000 a micro-batch, CUDA graphs. `--packed` leaves padding out, as
verl does by default. With `--sglang` SGLang generates; with `--critic` it is PPO. These two, packed sequences and a
critic, take flash-attn, of which the wheel without an extension is enough, for torch has the kernels. The release of
verl is the one that is installed, 0.7 or newer. With RLTRACE_DISABLE=verl,... in the environment it is a run with fewer
hooks.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
import verl_pairs
from rltrace_reference.measure_overhead import WARM_UP_STEPS, plan

from rltrace.analysis import summarize
from rltrace.analysis.intervals import EMPTY, Intervals, covered_ns
from rltrace.analysis.overhead import (
    LEAST_PAIRS,
    TimedStep,
    bookkept_cost,
    compare,
    phase_pairs,
    process_costs,
    step_pairs,
)
from rltrace.events import STEP, Span
from rltrace.read.recording import Recording

SHAPES = {
    "tiny": {"vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512},
    "1.7b": {"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16}
    | {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 6144},
    "8b": {"vocab_size": 151936, "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288},
}
METHODS = {
    "old_log_prob": ("compute_log_prob", "trainer.old_log_prob"),
    "ref": ("compute_ref_log_prob", "trainer.ref_log_prob"),
    "update_actor": ("update_actor", "trainer.update_actor"),
    "update_weights": ("update_weights", "trainer.update_weights"),
}
"""verl's timer, the worker's method that it is around, and our span around the trainer's function that calls it."""
METHODS_OF_CRITIC = {
    "values": (("infer_batch", "compute_values"), "trainer.values"),
    "update_critic": (("train_mini_batch", "update_critic"), "trainer.update_critic"),
}
"""The same, where there is a critic, whose methods depend on the release."""
PHASES = ("gen", *METHODS, *METHODS_OF_CRITIC)
"""Those of verl's timers that stand beside each other in a step."""

LONG = {
    "data.train_batch_size": 16,
    "data.max_response_length": 512,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 16,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 16,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 16,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 16,
    "actor_rollout_ref.rollout.enforce_eager": False,
    "actor_rollout_ref.rollout.cudagraph_capture_sizes": "[1,2,4,8,16,32,48,64]",
    # Graphs without torch.compile, which would take a minute of every start.
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config": (
        """'{"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY"}'"""
    ),
}
"""verl's settings of a step that waits for the GPUs."""

ON_SGLANG = {
    "actor_rollout_ref.rollout.name": "sglang",
    # Those of its kernels that come in a wheel, or that Triton compiles.
    "+actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend": "triton",
    "+actor_rollout_ref.rollout.engine_kwargs.sglang.sampling_backend": "pytorch",
    # As `enforce_eager` asks for; verl turns off the other graphs alone.
    "+actor_rollout_ref.rollout.engine_kwargs.sglang.disable_piecewise_cuda_graph": True,
}
"""verl's settings of a run whose engine is SGLang's."""

PACKED = {
    "actor_rollout_ref.model.use_remove_padding": True,
    "+actor_rollout_ref.model.override_config.attn_implementation": "flash_attention_2",
}
"""verl's settings of sequences one behind the other."""

WITH_CRITIC = {
    "algorithm.adv_estimator": "gae",
    "actor_rollout_ref.actor.fsdp_config.param_offload": True,
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": True,
    "critic.strategy": "fsdp2",
    "critic.model.use_remove_padding": False,
    "critic.ppo_micro_batch_size_per_gpu": 2,
}
"""verl's settings of PPO, its models and states on the host while they are not used."""

FLASH_ATTENTION = Path(__file__).parent / "flash_attention"
"""What stands for flash-attn's extension."""

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# ---- inputs -----------------------------------------------------------------------------------------------------


def prepare(folder: Path, shape: str) -> int:
    """Write what the run reads, unless it is there in this shape; returns the number of the model's parameters.

    In a process of its own: a context of this one's would lie on the GPU all along.
    """
    made = folder / "made.txt"
    known, parameters = made.read_text().split() if made.exists() else ("", "0")
    if known == shape:
        return int(parameters)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        count = process.submit(write_inputs, folder, shape).result()
    made.write_text(f"{shape} {count}")
    return count


def write_inputs(folder: Path, shape: str) -> int:
    """Write a random Qwen3, a tokenizer of bytes and rows of sums; returns the number of the model's parameters."""
    import pandas as pd
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(special + alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[2], pad_token=special[0])
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder / "model")
    config = Qwen3Config(
        max_position_embeddings=1024, tie_word_embeddings=False, eos_token_id=2, pad_token_id=0, **SHAPES[shape]
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder / "model", max_shard_size="4GB")
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"What is {i} + {i + 1}? Answer after ####."}],
            "reward_model": {"style": "rule", "ground_truth": str(2 * i + 1)},
            "extra_info": {"index": i},
        }
        for i in range(64)
    ]
    pd.DataFrame(rows).to_parquet(folder / "rows.parquet")
    return sum(parameter.numel() for parameter in model.parameters())


TWO_TRAINERS = 9
"""First line of releases that has them."""


def release_line() -> int:
    """Second number of the installed verl's version."""
    return int(metadata.version("verl").split(".")[1])


def of_release(inputs: Path, critic: bool) -> dict[str, object]:
    """Settings that not every release has, or needs.

    Args:
        inputs: Folder of the model.
        critic: Whether there is one.
    """
    line = release_line()
    settings: dict[str, object] = {}
    configs = ["actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config"]
    if critic:
        settings["critic.model.path"] = inputs / "model"
        of_critic = "critic.model.fsdp_config" if line <= 7 else "critic.fsdp"
        settings |= {f"{of_critic}.{what}_offload": True for what in ("param", "optimizer")}
        configs.append(of_critic)
    if line <= 7:  # which takes the first of transformers' names of layers, a set in its version 5
        name = "wrap_policy.transformer_layer_cls_to_wrap"
        settings |= {f"+{config}.{name}": "[Qwen3DecoderLayer]" for config in configs}
    return settings


def command(inputs: Path, gpus: int, steps: int, use_v1: bool, **others: object) -> list[str]:
    """verl's own command line.

    Args:
        inputs: Folder of the model and of the rows.
        gpus: Ranks.
        steps: Of the run.
        use_v1: Whether with the new trainer, of the releases that have two.
        others: Settings by verl's names, which replace those here or come besides.
    """
    settings: dict[str, object] = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": inputs / "rows.parquet",
        "data.val_files": inputs / "rows.parquet",
        "data.train_batch_size": 8,
        "data.max_prompt_length": 128,
        "data.max_response_length": 128,
        "data.dataloader_num_workers": 0,
        "actor_rollout_ref.model.path": inputs / "model",
        "actor_rollout_ref.model.use_remove_padding": False,
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 2,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 2,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 2,
        "actor_rollout_ref.ref.fsdp_config.param_offload": True,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.n": 8,
        "actor_rollout_ref.rollout.ignore_eos": True,
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.25,
        "actor_rollout_ref.rollout.enforce_eager": True,
        "actor_rollout_ref.rollout.agent.num_workers": 2,
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes": 512,
        "trainer.logger": "console",
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": gpus,
        "trainer.total_training_steps": steps,
        "trainer.resume_mode": "disable",
        **({"trainer.use_v1": use_v1} if release_line() >= TWO_TRAINERS else {}),
        **others,
    }
    return [sys.executable, "-m", "verl.trainer.main_ppo", *(f"{name}={value}" for name, value in settings.items())]


def run(
    out: Path, words: list[str], pairs: int = 0, allocations: str = "", limit_s: int = 0
) -> tuple[Recording, list[dict[str, float]]]:
    """Run verl's command line under tracing; its Recording, and its own figures of every step."""
    environment = {}
    if pairs:
        switch = out / "switch"
        switch.write_bytes(verl_pairs.ON)
        for noted_before in (*out.glob(verl_pairs.STEPS), *out.glob(verl_pairs.COLLECTIONS.format(pid="*"))):
            noted_before.unlink()
        verl_pairs.write_distribution(out / "plugin")
        path = filter(None, [str(out / "plugin"), os.environ.get("PYTHONPATH")])
        environment = {verl_pairs.VARIABLE: f"{pairs}:{switch}", "PYTHONPATH": os.pathsep.join(path)}
    launcher = ["rltrace", "exec", "--out", str(out / "recording"), "--allocations", allocations, "--"]
    logged = execute(out, [*launcher, *words], limit_s, **environment)
    return Recording.open(out / "recording"), logged


def execute(out: Path, words: list[str], limit_s: int = 0, **environment: str) -> list[dict[str, float]]:
    """Run a command that is verl's; verl's own figures of every step.

    Args:
        out: Where its log goes.
        words: The command.
        limit_s: Seconds after which it is ended, which is no failure then; 0: never.
        **environment: Variables that are added to its environment.
    """
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    if importlib.util.find_spec("flash_attn") is not None and importlib.util.find_spec("flash_attn_2_cuda") is None:
        path = environment.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = f"{FLASH_ATTENTION}{os.pathsep}{path}"
    if limit_s:
        words = ["timeout", "--kill-after=20", str(limit_s), *words]
    log = out / "log.txt"
    with log.open("w") as file:
        done = subprocess.run(
            words, env=os.environ | offline | environment, stdout=file, stderr=subprocess.STDOUT, check=False
        )
    assert done.returncode == 0 or (limit_s and done.returncode in ENDED), log.read_text()[-4000:]
    return figures(log.read_text())


ENDED = 124, 137
"""What `timeout` leaves with where the time was over."""


def figures(log: str) -> list[dict[str, float]]:
    """What verl's console logger says of each step."""
    number = r"(?:np\.float64\()?([-+0-9.e]+)"
    return [
        {name: float(value) for name, value in re.findall(rf"(timing_s/\w+|training/global_step):{number}", line)}
        for line in log.splitlines()
        if "timing_s/step:" in line
    ]


# ---- reading ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spans:
    """The spans of a Recording: the driver's, every call that an arrow leads to, and the buckets."""

    driver: list[Span]
    calls: dict[str, Span]
    moving: dict[str, float]
    """Seconds that a call's process took to unpack its arguments and to pack its result."""
    sends: dict[str, Span]
    """By bucket."""
    loads: dict[str, Span]
    """By bucket."""
    transfers: dict[str, list[Span]]
    """The buckets of each transfer of the weights to one rank's engine, by the rank and the number of its transfer."""

    @classmethod
    def of(cls, recording: Recording) -> Spans:
        """Read a Recording once."""
        driver, calls, moving, sends, loads, transfers = [], {}, {}, {}, {}, {}
        for process in recording.processes:
            spans = sorted((e for e in process.events() if isinstance(e, Span)), key=lambda span: span.start_ns)
            moving |= moved(spans)
            transfers |= transfers_of(spans, process.rank)
            for span in spans:
                if process.role == "driver":
                    driver.append(span)
                if span.name == "ray.call":
                    calls |= dict.fromkeys(span.flows_in, span)
                if span.name == "weight_sync.send":
                    sends[span.args["bucket"]] = span
                if span.name == "weight_sync.load":
                    loads[span.args["bucket"]] = span
        return cls(sorted(driver, key=lambda span: span.start_ns), calls, moving, sends, loads, transfers)

    def inside(self, step: Span) -> list[Span]:
        """The driver's spans that begin in a step."""
        return [span for span in self.driver if step.start_ns <= span.start_ns < step.end_ns]

    def of_name(self, step: Span, name: str) -> float:
        """Seconds of the driver's spans of a name in a step."""
        return sum(span.seconds for span in self.inside(step) if span.name == name)

    def converting(self, step: Span, name: str) -> float:
        """Seconds of the outermost spans `batch.*` inside the driver's spans of a name in a step."""
        around = [span for span in self.inside(step) if span.name == name]
        total, until_ns = 0.0, 0
        for span in self.inside(step):
            is_inside = any(other.start_ns <= span.start_ns < other.end_ns for other in around)
            if is_inside and span.name.startswith("batch.") and span.start_ns >= until_ns:
                total, until_ns = total + span.seconds, span.end_ns
        return total

    def seconds(self, step: Span, method: str | tuple[str, ...]) -> tuple[float, float] | None:
        """Dispatch, slowest rank and collect of a method's calls in a step; and that rank's `moving`; None: no call."""
        inside = self.inside(step)
        total, moving, found = 0.0, 0.0, False
        for i, dispatch in enumerate(inside):
            if dispatch.name != "ray.dispatch" or not str(dispatch.args["method"]).endswith(method):
                continue
            submits = [
                s for s in inside if s.name == "ray.submit" and dispatch.start_ns <= s.start_ns < dispatch.end_ns
            ]
            ranks = [
                (self.calls[key].seconds, self.moving[key]) for s in submits for key in s.flows_out if key in self.calls
            ]
            slowest, of_slowest = max(ranks, default=(0.0, 0.0))
            collect = next(span for span in inside[i:] if span.name == "ray.collect")
            total, moving = total + dispatch.seconds + slowest + collect.seconds, moving + of_slowest
            found = True
        return (total, moving) if found else None


def moved(spans: list[Span]) -> dict[str, float]:
    """By call, what its thread spent on (de)serializing since the call before it and until the one behind it."""
    found: dict[str, float] = {}
    unpacked: dict[int, float] = {}
    last: dict[int, str] = {}
    for span in spans:
        if span.name == "ray.call" and span.flows_in:
            last[span.thread] = span.flows_in[0]
            found[span.flows_in[0]] = unpacked.pop(span.thread, 0.0)
        elif span.name == "ray.deserialize":
            unpacked[span.thread] = unpacked.get(span.thread, 0.0) + span.seconds
        elif span.name == "ray.serialize" and span.thread in last:
            found[last[span.thread]] += span.seconds
    return found


def transfers_of(spans: list[Span], rank: int | None) -> dict[str, list[Span]]:
    """A rank's buckets sent, those of each `weight_sync` that has any together."""
    found: dict[int, list[Span]] = {}
    last = 0
    for span in spans:
        last = span.start_ns if span.name == "weight_sync" else last
        if span.name == "weight_sync.send":
            found.setdefault(last, []).append(span)
    return {f"rank {rank}, transfer {number}": sent for number, sent in enumerate(found.values(), 1)}


@dataclass(frozen=True)
class Timed:
    """One of verl's timers in one step, in seconds."""

    theirs: float
    parts: float
    """`ray.dispatch`, the slowest rank's `ray.call` and `ray.collect`; of a step, its span."""
    moving: float
    """The slowest rank's `ray.deserialize` before the call and `ray.serialize` behind it."""
    converting: float
    """Spans `batch.*` of the trainer: what it makes of the batch before and after the call."""
    around: float
    """Our span around the trainer's function, which does all of that and waits for Ray."""

    @property
    def off(self) -> float:
        """How far the parts are from verl's figure, relative."""
        return self.parts / self.theirs - 1


def timers(recording: Recording, logged: list[dict[str, float]]) -> dict[tuple[int, str], Timed]:
    """verl's figures and ours, by step and timer; of the steps that were recorded."""
    spans = Spans.of(recording)
    said_of = {int(said["training/global_step"]): said for said in logged}
    found = {}
    for step in (span for span in spans.driver if span.name == STEP and span.end_ns):
        number = step.args["step"]
        if number not in said_of:  # the run was ended in the middle of it
            continue
        said = said_of[number]
        found[number, "step"] = Timed(said["timing_s/step"], step.seconds, 0.0, 0.0, step.seconds)
        for timer, (method, name) in (METHODS | METHODS_OF_CRITIC).items():
            parts = spans.seconds(step, method)
            if parts is not None and f"timing_s/{timer}" in said:
                theirs, converting = said[f"timing_s/{timer}"], spans.converting(step, name)
                found[number, timer] = Timed(theirs, *parts, converting, spans.of_name(step, name))
    return found


def planned(logged: list[dict[str, float]], pairs: int, collecting_s: list[float]) -> list[TimedStep]:
    """verl's own seconds of every step and of its parts, each with the pair that it belongs to."""
    steps = zip(plan(pairs, seed=0), logged, collecting_s, strict=False)
    return [
        TimedStep(
            step=i,
            seconds=said["timing_s/step"],
            recorded=on,
            pair=pair,
            phases={phase: said[f"timing_s/{phase}"] for phase in PHASES if f"timing_s/{phase}" in said}
            | {COLLECTING: spent_s, NOT_COLLECTING: said["timing_s/step"] - spent_s},
        )
        for i, ((pair, on), said, spent_s) in enumerate(steps)
    ]


COLLECTING, NOT_COLLECTING = "garbage collections", "all but these"


def noted(file: Path) -> Intervals:
    """The lines of a file of `verl_pairs`, shape (N, 2); none of a file that nobody began."""
    lines = file.read_text().splitlines() if file.exists() else []
    return np.array([line.split() for line in lines], np.int64).reshape(-1, 2)


def collecting(folder: Path, pids: Iterable[int]) -> list[float]:
    """Of each step that ended, seconds in which at least one of these processes collected all its garbage.

    A rank that collects lets the others wait, so what two of them do at once counts once.
    """
    spent = [noted(folder / verl_pairs.COLLECTIONS.format(pid=pid)) for pid in pids]
    return [
        covered_ns(EMPTY, *(np.clip(rows, start_ns, end_ns) for rows in spent)) / 1e9
        for start_ns, end_ns in noted(folder / verl_pairs.STEPS)
    ]


def main() -> None:
    """Run, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--inputs", type=Path, help="folder of the model, made unless it is there; OUT where not given")
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--v1", action="store_true", help="verl's new trainer")
    parser.add_argument("--pairs", type=int, default=0, help="of steps, behind two that warm up")
    parser.add_argument("--bare", action="store_true", help="without rltrace")
    parser.add_argument(
        "--allocations", metavar="STEPS", default="", help="whose every allocation is kept, as 3 or 3,10"
    )
    parser.add_argument("--long", action="store_true", help="steps that wait for the GPUs")
    parser.add_argument("--packed", action="store_true", help="without padding, which takes flash-attn")
    parser.add_argument("--sglang", action="store_true", help="SGLang in vLLM's place")
    parser.add_argument("--critic", action="store_true", help="PPO, with a critic, which takes flash-attn")
    parser.add_argument("--limit", type=int, default=0, metavar="SECONDS", help="end the run then")
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE", help="verl's own, instead of those here")
    given = parser.parse_intermixed_args()
    if wrong := [word for word in given.settings if "=" not in word]:
        parser.error(f"{', '.join(wrong)}: say SETTING=VALUE")
    if given.bare and given.allocations:
        parser.error("--allocations: nothing is recorded of a run that is --bare")
    given.out.mkdir(parents=True, exist_ok=True)
    inputs = given.inputs or given.out
    parameters = prepare(inputs, given.shape)
    steps = WARM_UP_STEPS + 2 * given.pairs if given.pairs else given.steps
    settings = {"actor_rollout_ref.rollout.n": given.samples} | (LONG if given.long else {})
    settings |= PACKED if given.packed else {}
    settings |= ON_SGLANG if given.sglang else {}
    settings |= WITH_CRITIC if given.critic else {}
    settings |= of_release(inputs, given.critic)
    settings |= dict(word.split("=", 1) for word in given.settings)
    words = command(inputs, given.gpus, steps, given.v1, **settings)
    if given.bare:
        show_bare(execute(given.out, words, given.limit))
        return
    recording, logged = run(given.out, words, given.pairs, given.allocations, given.limit)
    show(recording, logged, parameters)
    if given.pairs:
        workers = [process.pid for process in recording.processes if process.role == "worker"]
        show_pairs(recording, planned(logged, given.pairs, collecting(given.out, workers)))


LIMIT = 0.01
"""Of a step, which tracing is to stay below."""


def show_pairs(recording: Recording, timed: list[TimedStep]) -> None:
    """Print what recording costs, by verl's own figures of the steps and by our bookkeeping."""
    found = compare("recorded and not", "pair of steps", LEAST_PAIRS, step_pairs(timed), LIMIT)
    costs = process_costs(recording)
    print(*timed, *(cost for cost in costs if cost.seconds > 0), found, sep="\n")
    in_phases = phase_pairs(timed)
    for phase in dict.fromkeys(phase for pair in in_phases for phase in pair):
        pairs = [pair[phase] for pair in in_phases if phase in pair]
        if any(off_s > 0 for _, off_s in pairs):
            print(compare(phase, "pair of steps", LEAST_PAIRS, pairs, LIMIT))
    if found.without_seconds is not None and (share := bookkept_cost(costs, found.without_seconds)) is not None:
        print(f"by our own bookkeeping {100 * share:.2f} % of a step")


def show_bare(logged: list[dict[str, float]]) -> None:
    """Print what verl says of the steps of a run without rltrace, behind those that warm up."""
    seconds = [said["timing_s/step"] for said in logged][WARM_UP_STEPS:]
    spread_s = statistics.stdev(seconds) if len(seconds) > 1 else 0.0
    print(f"without rltrace: {len(seconds)} steps, mean {statistics.mean(seconds):.4f} s, deviation {spread_s:.4f} s")
    print(*(f"{s:.4f}" for s in seconds))


def show(recording: Recording, logged: list[dict[str, float]], parameters: int) -> None:
    """Print what verl says and what the Recording says."""
    for (step, timer), it in timers(recording, logged).items():
        print(
            f"step {step}  {timer:14} verl {it.theirs:8.4f} s  dispatch, slowest rank, collect {it.parts:8.4f} s "
            f"{100 * it.off:+6.2f} %  moving {it.moving:7.4f} s, converting {it.converting:7.4f} s "
            f" around all in the trainer {it.around:8.4f} s"
        )
    for transfer, sent in sorted(Spans.of(recording).transfers.items()):
        size_bytes = sum(span.args["bytes"] for span in sent)
        print(f"{transfer}: {len(sent)} buckets, {size_bytes} bytes, {size_bytes / parameters:.3f} per parameter")
    found = summarize(recording)
    for device in found.memory:
        print(f"{device.lane}, {device.device}: {device.residual}, unknown {device.unknown}")
    for peak in found.allocations:
        print(
            f"step {peak.step}  {peak.lane}: every allocation: at most {peak.peak_bytes:,} bytes, {peak.lost} lost, "
            f"all processes have them from {peak.late_seconds:.3f} s of the step on; {peak.at_peak_bytes}"
        )
    for missed in found.allocations_missed:
        print(f"step {missed.step}: none kept by {', '.join(missed.processes) or 'anybody'}: {missed.reason}")


if __name__ == "__main__":
    main()
