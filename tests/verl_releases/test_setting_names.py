"""Each setting that a finding names exists, in the program and the releases that it says."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import yaml
from rltrace_reference.config import Config
from torch.distributed.checkpoint import async_save
from torch.distributed.fsdp import FSDPModule, fully_shard
from verl_release import CACHE, RELEASES, Release, installed

from rltrace.analysis import findings
from rltrace.analysis.findings.finding import Setting
from rltrace.analysis.findings.programs import EXAMPLE, applicable, has_setting

DOTTED = re.compile(r"\b[a-z_]+(?:\.[a-z_]+)+\b")
ARGUMENT = re.compile(r"\b([a-z_]+)=")
TRL = "trl==1.16.0"
VLLM_SOURCES = CACHE / "sources" / "vllm-0.26.0"
"""Made by `make test-frameworks`."""


def settings_of(program: str) -> list[Setting]:
    """All settings of a program that a finding may name."""
    names = [module.name for module in pkgutil.iter_modules(findings.__path__, f"{findings.__name__}.")]
    found = [one for name in names for value in vars(importlib.import_module(name)).values() for one in _within(value)]
    return [setting for setting in dict.fromkeys(found) if setting.program == program]


def _within(value: Any) -> Iterator[Setting]:
    if isinstance(value, Setting):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _within(one)
    elif isinstance(value, dict):
        yield from _within(list(value.values()))


@cache
def verl_config(release: Release) -> Any:
    """What verl ships as the configuration of its trainer, in one piece."""
    folder = installed(f"verl-{release.version}", [f"verl=={release.version}"]) / "verl" / "trainer" / "config"
    files = [folder / name for name in ("_generated_ppo_trainer.yaml", "ppo_trainer.yaml")]
    return yaml.safe_load(next(file for file in files if file.exists()).read_text())


def has_key(config: Any, key: str) -> bool:
    """Whether a configuration has a dotted key."""
    for part in key.split("."):
        if not isinstance(config, dict) or part not in config:
            return False
        config = config[part]
    return True


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)
def test_verl_has_its_keys(release: Release) -> None:
    """Each key of verl is in the configuration of each release that the setting is said to be of."""
    of_release = [setting for setting in settings_of("verl") if has_setting(setting, release.version)]
    keys = {setting.change: DOTTED.findall(setting.change) for setting in of_release}
    assert len(keys) > 10 and all(keys.values()), "each setting of verl names a key"
    missing = [key for named in keys.values() for key in named if not has_key(verl_config(release), key)]
    assert missing == []


def test_verl_settings_end_where_keys_do() -> None:
    """A setting that is said to begin or to end with a release is not in the one before or after."""
    bounded = [setting for setting in settings_of("verl") if setting.since or setting.until]
    assert bounded
    for setting in bounded:
        outside = [release for release in RELEASES if not has_setting(setting, release.version)]
        keys = DOTTED.findall(setting.change)
        there = [(key, one.version) for one in outside for key in keys if has_key(verl_config(one), key)]
        assert outside and there == []


def trl_parameters() -> tuple[set[str], set[str]]:
    """Arguments of TRL's GRPOConfig and of its GRPOTrainer, read from the wheel's source."""
    from transformers import TrainingArguments  # a second, and everybody who collects the tests would wait for it

    folder = installed(TRL.replace("==", "-"), [TRL]) / "trl" / "trainer"
    known = {field.name for field in fields(TrainingArguments)}
    for file, name in (("base_config.py", "_BaseConfig"), ("grpo_config.py", "GRPOConfig")):
        known |= _annotated(folder / file, name)
    (trainer,) = _classes(folder / "grpo_trainer.py", "GRPOTrainer")
    (init,) = [node for node in trainer.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    return known, {argument.arg for argument in init.args.args}


def _classes(file: Path, name: str) -> list[ast.ClassDef]:
    return [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef) and node.name == name]


def _annotated(file: Path, name: str) -> set[str]:
    (made,) = _classes(file, name)
    return {str(node.target.id) for node in made.body if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]


def test_trl_has_its_arguments() -> None:
    """Each argument of TRL is one of GRPOConfig, or of GRPOTrainer where the setting says so."""
    of_config, of_trainer = trl_parameters()
    settings = settings_of("TRL")
    assert len(settings) > 3
    for setting in settings:
        named = set(ARGUMENT.findall(setting.change))
        assert named and named <= (of_trainer if "GRPOTrainer(" in setting.change else of_config), setting.change


def test_example_has_its_keys() -> None:
    """Each key of the reference run is one of its configuration."""
    config = msgspec.to_builtins(Config())
    settings = settings_of(EXAMPLE)
    assert settings and all(DOTTED.findall(setting.change) for setting in settings)
    assert [key for setting in settings for key in DOTTED.findall(setting.change) if not has_key(config, key)] == []


@pytest.mark.skipif(not VLLM_SOURCES.exists(), reason=f"no sources of vLLM in {VLLM_SOURCES}: make test-frameworks")
def test_vllm_has_its_arguments() -> None:
    """Each argument of vLLM is one of its engine or of its compilation."""
    known = _annotated(VLLM_SOURCES / "vllm" / "engine" / "arg_utils.py", "EngineArgs")
    known |= _annotated(VLLM_SOURCES / "vllm" / "config" / "compilation.py", "CompilationConfig")
    settings = [setting for setting in settings_of("vLLM") if not setting.change.startswith("sleep(level=2)")]
    names = {name for setting in settings for name in re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", setting.change)}
    assert names and names <= known


def test_torch_has_its_arguments() -> None:
    """What PyTorch is asked for is there."""
    parameters = {
        "torch.compile": inspect.signature(torch.compile).parameters,
        "fully_shard": inspect.signature(fully_shard).parameters,
        "DataLoader": inspect.signature(torch.utils.data.DataLoader.__init__).parameters,
    }
    for setting in settings_of("PyTorch"):
        for name, given in re.findall(r"([A-Za-z_.]+)\(([^)]*)\)", setting.change):
            assert name in parameters and set(ARGUMENT.findall(given)) <= parameters[name].keys(), setting.change
    assert callable(async_save) and callable(FSDPModule.set_modules_to_forward_prefetch)


def test_settings_are_of_the_run() -> None:
    """Of a run of one program no setting of another one is named, and none of another release."""
    settings = [
        Setting("verl", "reward.num_workers: more", since="0.7.0"),
        Setting("verl", "reward_model.launch_reward_fn_async=True", until="0.7.0"),
        Setting("TRL", "GRPOConfig(save_steps=...)"),
        Setting("your program", "less"),
    ]
    assert applicable(settings, {"verl"}, {"verl": "0.9.1"}) == [settings[0], settings[3]]
    assert applicable(settings, {"verl"}, {"verl": "0.6.1.post1"}) == [settings[1], settings[3]]
    assert applicable(settings, {"verl"}, {}) == [settings[0], settings[1], settings[3]]
    assert applicable(settings, {"TRL"}, {"verl": "0.9.1"}) == settings[2:]
