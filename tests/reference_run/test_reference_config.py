"""A wrong configuration is one line and exit code 2, before anything is made or started."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rltrace_reference import config as configuration
from rltrace_reference.__main__ import main
from rltrace_reference.config import Config, UnmetNeedError

from rltrace.errors import ConfigError

LAPTOP = Path(__file__).parents[2] / "examples" / "laptop.yaml"

WRONG = {
    "unknown key": ("rollout: {nn: 4}", "rollout.nn: unknown key; use one of: n, max_tokens"),
    "unknown section": ("rolout: {n: 4}", "rolout: unknown key; use one of: ranks, steps"),
    "wrong type": ("steps: many", "steps: Expected `int`, got `str`, found 'many'"),
    "a float that YAML reads as text": ("actor: {learning_rate: 3e-3}", "write 0.003"),
    "not a mapping": ("- 1", "found [1]"),
    "not YAML": ("steps: [", "line 1, column 9: not YAML: while parsing a flow node"),
    "a slip of the indent": ("ranks: 2\nrollout:\n  n: 4\n max_tokens: 3\n", "line 4, column 2: not YAML: "),
    "a character that YAML has not": ("ranks: 2\nsteps: \x00", "not YAML: "),
    "a key given twice": ("ranks: 2\nsteps: 3\nranks: 4", "line 3: ranks: given twice, first in line 1"),
    "a key of a section given twice": (
        "rollout:\n  n: 4\n  max_tokens: 3\n  n: 8",
        "line 4: n: given twice, first in line 2",
    ),
    "out of range": ("ranks: 0", "ranks: Expected `int` >= 1, found 0"),
    "a group of one": ("rollout: {n: 1}", "rollout.n: Expected `int` >= 2, found 1"),
    "a small KV pool": ("rollout: {kv_cache_megabytes: 32}", "Expected `float` >= 64.0, found 32"),
    "no such sleep level": (
        "rollout: {sleep_level: 3}",
        "rollout.sleep_level: Invalid enum value 3, found 3; use one of: 0, 1, 2",
    ),
    "no such engine": (
        "rollout: {engine: vlm}",
        "Invalid enum value 'vlm', found 'vlm'; use one of: auto, embedded, vllm, sglang",
    ),
    "no such device": ("device: gpu", "device: Invalid enum value 'gpu', found 'gpu'; use one of: auto, c"),
    "ranks that do not divide the batch": (
        "ranks: 3",
        "task.prompts: 32 prompts do not divide over ranks: 3; use 30 or 33",
    ),
    "minibatches that do not divide": ("actor: {minibatches: 5}", "5 minibatches do not divide the 256 sequences"),
    "a bucket without room for all ranks": (
        "rollout: {bucket_megabytes: 0.0001}",
        "rollout.bucket_megabytes: a bucket of 104 bytes cannot hold 128 of each of ranks: 2; use at least 0.000244141",
    ),
    "vLLM on a CPU": ("{device: cpu, rollout: {engine: vllm}}", "rollout.engine: vllm does not run on device: cpu"),
    "SGLang on a CPU": (
        "{device: cpu, rollout: {engine: sglang}}",
        "rollout.engine: sglang does not run on device: cpu",
    ),
    "the embedded engine on a GPU": (
        "{device: cuda, rollout: {engine: embedded}}",
        "rollout.engine: embedded does not run on device: cuda",
    ),
    "a model length below a sequence": (
        "{device: cuda, task: {prompt_tokens: 20}, rollout: {max_model_len: 30}}",
        "rollout.max_model_len: 30 tokens, a sequence needs 32 (task.prompt_tokens 20 + rollout.max_tokens 12)",
    ),
    "a prompt without a digit": ("task: {prompt_tokens: 1}", "task.prompt_tokens: Expected `int` >= 2, found 1"),
    "a KV pool below one sequence a slot": (
        "rollout: {slots: 100000}",
        "rollout.slots: 100000 hold 2 tokens a slot, a sequence needs 14",
    ),
    "a vocabulary below the task's": (
        "model: {vocab_size: 8}",
        "model.vocab_size: 8 tokens, the count-down task uses 13",
    ),
    "heads that KV heads do not share": (
        "model: {num_attention_heads: 3}",
        "3 heads do not share num_key_value_heads: 2",
    ),
    "an odd head": ("model: {head_dim: 15}", "model.head_dim: 15 is odd"),
    "sleep without sync": ("rollout: {sync: false}", "rollout.sleep_level: 2 with rollout.sync: false"),
    "a relaunched engine that sleeps": (
        "rollout: {wake_up: relaunch}",
        "rollout.wake_up: relaunch with sleep_level: 2 and sync: true; an engine that ends",
    ),
    "a limit beside a GPU's own": (
        "{device: cuda, memory_limit_megabytes: 100}",
        "memory_limit_megabytes: 100 with device: cuda, where the GPU is the limit; leave it out",
    ),
    "a checkpoint that is not there": ("model: {path: /nowhere}", "model.path: cannot read /nowhere/config.json"),
}


def load(file: Path) -> Config:
    return configuration.load(file, vocabulary=13)


@pytest.mark.parametrize("case", WRONG)
def test_wrong_config_is_one_line(case: str, tmp_path: Path) -> None:
    """A wrong configuration says file, key, values and next step in one line."""
    text, expected = WRONG[case]
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(file)
    message = str(caught.value)
    assert message.startswith(f"{file}: ")
    assert expected in message
    assert "\n" not in message
    assert "; " in message  # a next step follows


@pytest.mark.parametrize(
    "text",
    [
        "rollout: {bucket_megabytes: 0.000244140625}",  # 128 bytes of each of two ranks
        "{device: cuda, task: {prompt_tokens: 20}, rollout: {max_model_len: 32}}",
        "rollout: {slots: 18724}",  # 14 tokens a slot
        "model: {vocab_size: 13}",
    ],
)
def test_what_is_just_enough_is_enough(text: str, tmp_path: Path) -> None:
    file = tmp_path / "enough.yaml"
    file.write_text(text)
    config = load(file)
    assert config.sequence_tokens in (14, 32)


@pytest.mark.parametrize(
    ("text", "force"), [("{}", False), ("{}", True), ("force: true", False), ("force: true", True)]
)
def test_force_in_file_or_beside_it(text: str, force: bool, tmp_path: Path) -> None:
    """`force` may be given in the file or beside it."""
    file = tmp_path / "force.yaml"
    file.write_text(text)
    assert configuration.load(file, vocabulary=13, force=force).force == (force or text != "{}")


@pytest.mark.parametrize(
    ("text", "address"), [("ray_address: 'here:1'", "here:1"), ("{}", "there:2"), ("ray_address: auto", "auto")]
)
def test_cluster_of_file_or_environment(
    text: str, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file names the cluster, or else the environment does."""
    monkeypatch.setenv("RAY_ADDRESS", "there:2")
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    assert load(file).ray_address == address


def test_command_ends_with_code_2(tmp_path: Path) -> None:
    """The command ends with one line and exit code 2, and makes nothing."""
    file, out = tmp_path / "wrong.yaml", tmp_path / "out"
    file.write_text("ranks: 3")
    done = subprocess.run(
        [sys.executable, "-m", "rltrace_reference", str(file), "--out", str(out)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        f"rltrace: {file}: task.prompts: 32 prompts do not divide over ranks: 3; use 30 or 33"
    ]
    assert not out.exists()


def test_missing_file_is_named(tmp_path: Path) -> None:
    """A file that does not exist is named."""
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file or directory; name a YAML file"):
        load(tmp_path / "none.yaml")


def test_override_of_merged_key(tmp_path: Path) -> None:
    """A key that overrides a merged one is not given twice."""
    file = tmp_path / "merged.yaml"
    file.write_text("model:\n  <<: {hidden_size: 32, head_dim: 16}\n  hidden_size: 128\n")
    model = load(file).model
    assert (model.hidden_size, model.head_dim) == (128, 16)


def test_laptop_example_has_the_defaults() -> None:
    """The laptop example spells out the defaults."""
    assert load(LAPTOP) == configuration.resolved(Config())


CHECKPOINT: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 32,
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 100,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}


def load_with_checkpoint(folder: Path, checkpoint: dict[str, Any]) -> Config:
    (folder / "config.json").write_text(json.dumps(checkpoint))
    file = folder / "run.yaml"
    file.write_text(f"{{model: {{path: {folder}}}, rollout: {{slots: 8}}}}")
    return load(file)


@pytest.mark.parametrize("name", ["gpu.yaml", "qwen3_8b_4gpu.yaml"])
def test_gpu_examples_are_readable(name: str) -> None:
    """The GPU examples can be read anywhere."""
    config = load(LAPTOP.parent / name)
    assert (config.device, config.rollout.engine, config.model.init) == ("cuda", "vllm", "sharded")


def test_size_of_the_8b_example() -> None:
    """The 8B example has the size of Qwen3-8B."""
    shapes = load(LAPTOP.parent / "qwen3_8b_4gpu.yaml").model.shapes().values()
    assert sum(math.prod(shape) for shape in shapes) == 8_190_735_360


def test_cpu_embeds_and_broadcasts(tmp_path: Path) -> None:
    """A CPU chooses the embedded engine and broadcasts."""
    file = tmp_path / "cpu.yaml"
    file.write_text("device: cpu")
    config = load(file)
    assert (config.rollout.engine, config.model.init) == ("embedded", "broadcast")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_of_gpus_is_what_the_machine_lacks(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no GPU, an engine of GPUs is a lack of the machine; where there is one, it is chosen with it."""
    file = tmp_path / "engine.yaml"
    file.write_text(f"rollout: {{engine: {engine}}}")
    monkeypatch.setattr(configuration, "_has_gpu", lambda: False)
    with pytest.raises(UnmetNeedError, match=f"^{file}: rollout.engine: {engine} needs a GPU, and .*; leave") as lack:
        load(file)
    assert lack.value.lacks == f"{engine} needs a GPU"
    monkeypatch.setattr(configuration, "_has_gpu", lambda: True)
    assert (load(file).device, load(file).rollout.engine) == ("cuda", engine)


def test_a_checkpoint_says_its_own_sizes(tmp_path: Path) -> None:
    model = load_with_checkpoint(tmp_path, CHECKPOINT).model
    assert (model.vocab_size, model.hidden_size, model.rope_theta) == (32, 96, 5000.0)
    assert not model.tie_word_embeddings  # Qwen3's own default


def test_checkpoint_is_broadcast_on_gpus(tmp_path: Path) -> None:
    """A checkpoint is broadcast on GPUs too.

    Every rank could draw random weights of its own; those of a file lie with one.
    """
    (tmp_path / "config.json").write_text(json.dumps(CHECKPOINT))
    file = tmp_path / "run.yaml"
    file.write_text(f"{{device: cuda, model: {{path: {tmp_path}}}}}")
    assert load(file).model.init == "broadcast"


def test_checkpoint_without_a_size(tmp_path: Path) -> None:
    """A checkpoint without a size is refused."""
    checkpoint = {name: value for name, value in CHECKPOINT.items() if name != "head_dim"}
    with pytest.raises(ConfigError, match=r"model\.path: .*config\.json does not say head_dim; name a whole"):
        load_with_checkpoint(tmp_path, checkpoint)


def test_checkpoint_with_wrong_size(tmp_path: Path) -> None:
    """A checkpoint with a wrong size is refused."""
    with pytest.raises(ConfigError, match=r"model\.path: .*config\.json: Expected `int`, got `str`"):
        load_with_checkpoint(tmp_path, CHECKPOINT | {"head_dim": "many"})


def test_checkpoint_engine_cannot_compute(tmp_path: Path) -> None:
    """A checkpoint that the engine would compute wrongly is refused."""
    with pytest.raises(ConfigError, match="rope_type yarn, the engine knows False and 'default'"):
        load_with_checkpoint(tmp_path, CHECKPOINT | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}})


def test_other_architecture_is_refused(tmp_path: Path) -> None:
    """A checkpoint of another architecture is refused."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {{path: {tmp_path}}}")
    with pytest.raises(ConfigError, match="model_type 'llama', not 'qwen3'"):
        load(file)


def test_other_system_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Another system is refused in one line."""
    monkeypatch.setattr(sys, "platform", "darwin")
    assert main([str(LAPTOP)]) == 1
    assert capsys.readouterr().err == (
        "rltrace: the reference run needs Linux, this is darwin; recordings can be read anywhere\n"
    )


def test_no_torch_to_check() -> None:
    """A configuration is checked in a Python that has not imported torch, which takes seconds."""
    program = f"""
import sys
from rltrace_reference.__main__ import checked
assert checked({str(LAPTOP)!r}).ranks == 2
print(sorted({{"torch", "ray", "transformers"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
