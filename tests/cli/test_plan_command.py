"""`rltrace plan`: configurations of three frameworks, Recordings, and what is said of bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from shipped import QWEN, VERL

from rltrace.cli import main

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "examples" / "qwen3_8b_4gpu.yaml"
QWEN3_8B = (
    "vocab_size=151936,hidden_size=4096,num_hidden_layers=36,num_attention_heads=32,num_key_value_heads=8,"
    "head_dim=128,intermediate_size=12288"
)
TINY = {
    "model_type": "qwen2",
    "vocab_size": 1024,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
}
VERL_SETTINGS = {
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.actor.strategy": "fsdp2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref.rollout.n": 8,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "trainer.n_gpus_per_node": 4,
}
TRL_SETTINGS = {"per_device_train_batch_size": 4, "num_generations": 8, "gradient_accumulation_steps": 2}


def call(*words: object) -> Result:
    return CliRunner().invoke(main, ["plan", *map(str, words)], prog_name="rltrace")


def planned(*words: object) -> dict[str, Any]:
    done = call(*words, "--json") if "--" not in words else call("--json", *words)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder with a `config.json`."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


def hydra(**more: object) -> list[str]:
    """Return verl's settings as words; `__` is a dot."""
    settings = VERL_SETTINGS | {name.replace("__", "."): value for name, value in more.items()}
    return [f"{name}={value}" for name, value in settings.items()]


def test_the_reference_run_and_its_recording_agree() -> None:
    """A configuration is planned as the run that was made of it, whose measured contexts change little."""
    pytest.importorskip("yaml")
    before = planned(REFERENCE, "--gpu", "H200")
    after = planned(QWEN)
    assert before["parameters"] == after["parameters"] == 8_190_735_360
    assert before["peak_phase"] == after["peak_phase"] == "rollout.generate"
    assert after["peak_bytes"] == pytest.approx(before["peak_bytes"], rel=0.01)
    assert (before["recording"], after["recording"]) == (None, str(QWEN))
    assert sum(owner["bytes"] for owner in before["owners"].values()) == before["peak_bytes"]


def test_a_recording_of_verl_is_planned_by_its_command() -> None:
    """The settings are those of the command line in its manifest; the model's sizes are given."""
    found = planned(VERL, "--shape", QWEN3_8B)
    assert (found["framework"], found["ranks"], found["parameters"]) == ("verl", 4, 8_190_735_360)
    assert found["peak_bytes"] == pytest.approx(60.06 * 2**30, rel=0.01)


def test_verl_is_read_from_a_script_yaml_and_words(tmp_path: Path, checkpoint: Path) -> None:
    """The same settings give the same plan, wherever they stand; words behind a file change it."""
    model = {"actor_rollout_ref__model__path": checkpoint}
    script = tmp_path / "train.sh"
    script.write_text("set -x\npython3 -m verl.trainer.main_ppo \\\n  " + " \\\n  ".join(hydra(**model)) + " $@\n")
    nested: dict[str, Any] = {}
    for word in hydra(**model):
        name, _, value = word.partition("=")
        *parts, last = name.split(".")
        place = nested
        for part in parts:
            place = place.setdefault(part, {})
        place[last] = int(value) if value.isdigit() else value
    config = tmp_path / "verl.yaml"
    config.write_text(json.dumps(nested))
    by_words = planned("--gpu", "H100", "--", *hydra(**model))
    assert planned("--gpu", "H100", script) == planned("--gpu", "H100", config) == by_words
    more = planned("--gpu", "H100", script, "--", "actor_rollout_ref.rollout.gpu_memory_utilization=0.7")
    assert more["kv_cache_tokens"] > by_words["kv_cache_tokens"]


def test_trl_is_read_from_yaml_and_arguments(tmp_path: Path, checkpoint: Path) -> None:
    """TRL's arguments are read from a YAML file and from the words of its scripts."""
    settings = TRL_SETTINGS | {"model_name_or_path": str(checkpoint), "use_vllm": True}
    config = tmp_path / "grpo.yaml"
    config.write_text(json.dumps(settings))
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    found = planned("--gpu", "80GiB", config)
    assert found == planned("--gpu", "80GiB", "--", *words)
    assert found["framework"] == "TRL"
    whole = planned("--gpu", "80GiB", "--", *words)["owners"]["actor.optimizer"]["bytes"]
    adapters = planned("--gpu", "80GiB", "--", *words, "--use_peft", "--lora_r", "4")["owners"]
    assert adapters["actor.optimizer"]["bytes"] < whole


def test_the_screen_says_what_the_json_does() -> None:
    """The verdict, the peak with its uncertainty, each ceiling and what is not known are on the screen."""
    done = call(QWEN)
    assert done.exit_code == 0, done.output
    found = planned(QWEN)
    assert f"{found['verdict']}: peak {found['peak_bytes'] / 2**30:.2f} GiB ±" in done.stdout
    assert all(owner in done.stdout for owner in found["owners"])
    for one in found["ceilings"]:
        assert one["setting"].rpartition(".")[2] in done.stdout
    assert f"taken from {QWEN}" in " ".join(done.stdout.split())
    assert "its peak was 62.86 GiB; 84 of 84 figures are within 5 % or 512 MiB" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "nothing to plan; give a CONFIG or a RUN"),
        (("nothing.yaml", "--gpu", "H100"), "nothing.yaml: no such file; give"),
        (("--gpu", "GTX9", "--shape", QWEN3_8B, "--", *hydra()), "--gpu GTX9: not known; give one of"),
        (("--shape", QWEN3_8B, "--", *hydra()), "which GPU? give --gpu"),
        (("--gpu", "H100", "--", "model=3", "lr=2"), "of no framework that plan knows; give settings of"),
        (("--gpu", "H100", "--", *hydra()), "does not say actor_rollout_ref.model.path; give --model"),
        (
            ("--gpu", "H100", "--", *hydra(actor_rollout_ref__model__path="/not/here")),
            "is /not/here, which is not on this machine; give --model",
        ),
        (
            ("--gpu", "H100", "--shape", QWEN3_8B, "--", *hydra(trainer__n_gpus_per_node=3)),
            "2048 does not divide over ranks: 3; give 2046 or 2049",
        ),
        (
            ("--gpu", "H100", "--shape", QWEN3_8B, "--", *hydra(actor_rollout_ref__actor__fsdp_config__fsdp_size=3)),
            "fsdp_size: 3; give 3 or 6",
        ),
        (
            ("--gpu", "H100", "--shape", QWEN3_8B, "--", *hydra(actor_rollout_ref__rollout__name="hf")),
            "rollout.name is 'hf'; plan knows vllm, sglang",
        ),
        (
            ("--gpu", "H100", "--shape", "hidden=3", "--", *hydra()),
            "--shape hidden=3: not a size; give NAME=SIZE",
        ),
        (
            ("--gpu", "H100", "--shape", QWEN3_8B, "--", "--per_device_train_batch_size=4", "--num_generations=3"),
            "4 does not divide over num_generations: 3; give 3 or 6",
        ),
        (
            ("--gpu", "H100", "--shape", QWEN3_8B, "--", *(f"--{name}={value}" for name, value in TRL_SETTINGS.items()),
             "--bf16=true", "--fp16=true"),
            "bf16 and fp16 are both true; give one of them",
        ),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(words: tuple[str, ...], said: str) -> None:
    """What cannot be planned is said in one line, with both values and what to give."""
    done = call(*words)
    assert done.exit_code == 2, done.output
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_sglang_of_the_reference_run_is_not_planned(tmp_path: Path) -> None:
    """Plan says that it does not know this engine of the reference run, where it would say wrong bytes."""
    file = tmp_path / "run.yaml"
    file.write_text("{device: cuda, ranks: 1, rollout: {engine: sglang}}")
    done = call(file, "--gpu", "H100")
    assert done.exit_code == 2 and done.output.count("\n") == 1
    assert "rollout.engine: sglang, and of the reference run's engines plan knows vllm alone" in done.output


def test_a_laptops_recording_is_refused(tmp_path: Path) -> None:
    """A configuration that says device: cpu is none of GPUs."""
    pytest.importorskip("yaml")
    config = tmp_path / "cpu.yaml"
    config.write_text("device: cpu\nmodel: {hidden_size: 64}\n")
    done = call(config, "--gpu", "H100")
    assert done.exit_code == 2
    assert re.search("device: cpu, and a plan is of GPUs; give device: cuda", done.stderr)
