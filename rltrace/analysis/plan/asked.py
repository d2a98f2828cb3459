"""What was asked: which framework's settings these are, of which model, on which card."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rltrace.analysis.plan import overrides, settings_reference, settings_trl, settings_verl
from rltrace.analysis.plan.cards import Card, card_of
from rltrace.analysis.plan.measured import Measured, with_engine
from rltrace.analysis.plan.settings import Settings
from rltrace.analysis.plan.shapes import ModelShape, UnknownModelError, read_shape, shape_of
from rltrace.errors import ConfigError

Reader = Callable[[str], dict[str, Any]]

REFERENCE_KEYS = {"model", "task", "rollout", "actor", "ref"}
VERL_PREFIXES = ("actor_rollout_ref.", "algorithm.", "critic.", "trainer.", "data.")
TRL_KEYS = {"per_device_train_batch_size", "model_name_or_path", "num_generations", "use_vllm", "max_completion_length"}
KNOWN = "the reference run (model:, rollout:, actor:), verl (actor_rollout_ref. ...) or TRL (--model_name_or_path ...)"


class Wanted(NamedTuple):
    """What the options say."""

    gpu: str | None
    ranks: int | None
    model: str | None
    shape: str


class Asked(NamedTuple):
    """Settings, and what is known of such a machine."""

    settings: Settings
    known: Measured | None


def of_words(words: Sequence[str], wanted: Wanted, known: Measured | None, read_reference: Reader) -> Asked:
    """Return the settings in a file, with those that follow it, or in words alone.

    Args:
        words: A file, and settings; or settings alone.
        wanted: The options.
        known: Figures of a Recording, whose card is taken if none is named.
        read_reference: Reads a configuration of the reference run.

    Raises:
        ConfigError: the file cannot be read, or nobody knows whose settings these are.
    """
    if not words:
        raise ConfigError("nothing to plan; give a CONFIG or a RUN, or settings after --")
    file = Path(words[0])
    if not file.is_file():
        if "=" not in words[0] and not words[0].startswith("-") and ("/" in words[0] or file.suffix):
            raise ConfigError(f"{words[0]}: no such file; give a CONFIG or a RUN, or settings after --")
        return Asked(_of_flat(*_of_command(words), "settings", wanted, known), known)
    text = _text(file)
    said = _yaml(text) if file.suffix in (".yaml", ".yml") else None
    if said is not None and REFERENCE_KEYS & set(said) and not _is_verl(overrides.flat(said)):
        if len(words) > 1:
            raise ConfigError(f"{words[1]}: {file} is a configuration of the reference run; change the file instead")
        config = read_reference(words[0])
        if said.get("device") == "cpu":
            raise ConfigError(f"{file}: device: cpu, and a plan is of GPUs; give device: cuda")
        return Asked(settings_reference.settings(_ranked(config, wanted), _card(wanted, known)), known)
    hydra, trl = _of_command(overrides.words_of(text)) if said is None else (overrides.flat(said), dict(said))
    more_hydra, more_trl = _of_command(words[1:])
    return Asked(_of_flat(hydra | more_hydra, trl | more_trl, words[0], wanted, known), known)


def of_manifest(
    manifest: Mapping[str, Any], run: str, words: Sequence[str], wanted: Wanted, known: Measured | None
) -> Asked:
    """Return the settings of a run that was recorded: the reference run's are in its manifest, others' in its command.

    Raises:
        ConfigError: nobody knows whose settings these are.
    """
    config = manifest.get("config") or {}
    if set(config) >= REFERENCE_KEYS:
        settings = settings_reference.settings(_ranked(config, wanted), _card(wanted, known))
    else:
        hydra, trl = _of_command([*manifest.get("command", ()), *words])
        settings = _of_flat(hydra, trl, run, wanted, known)
    if known is not None and settings.engine is not None and not words:
        known = with_engine(known, settings.engine)
    return Asked(settings, known)


def _of_command(words: Sequence[str]) -> tuple[overrides.Flat, overrides.Flat]:
    return overrides.hydra(words), overrides.options(words)


def _is_verl(said: Mapping[str, Any]) -> bool:
    return any(name.startswith(VERL_PREFIXES) and "." in name for name in said)


def _of_flat(
    hydra: overrides.Flat, trl: overrides.Flat, where: str, wanted: Wanted, known: Measured | None
) -> Settings:
    if any(name.startswith("actor_rollout_ref.") for name in hydra):
        if wanted.ranks is not None:
            hydra = hydra | {"trainer.n_gpus_per_node": wanted.ranks, "trainer.nnodes": 1}
        model = _model(wanted, hydra.get(settings_verl.MODEL_PATH), settings_verl.MODEL_PATH, where)
        return settings_verl.settings(hydra, _card(wanted, known), model, where)
    if TRL_KEYS & set(trl):
        model = _model(wanted, trl.get(settings_trl.MODEL_PATH), settings_trl.MODEL_PATH, where)
        return settings_trl.settings(trl, _card(wanted, known), model, where, wanted.ranks)
    raise ConfigError(f"{where}: of no framework that plan knows; give settings of {KNOWN}")


def _ranked(config: Mapping[str, Any], wanted: Wanted) -> dict[str, Any]:
    return {**config, **({"ranks": wanted.ranks} if wanted.ranks is not None else {})}


def _card(wanted: Wanted, known: Measured | None) -> Card:
    if wanted.gpu is not None:
        return card_of(wanted.gpu)
    if known is not None:
        return known.card
    raise ConfigError("which GPU? give --gpu H100, --gpu 80GiB, or --like RUN, a Recording of such a machine")


def _model(wanted: Wanted, said: Any, name: str, where: str) -> ModelShape:
    if wanted.shape:
        return _shape(wanted.shape)
    path = wanted.model or said
    if not isinstance(path, str):
        raise UnknownModelError(f"{where}: does not say {name}", "give --model PATH, or the model's sizes by --shape")
    if not Path(path).exists() and wanted.model is None:
        raise UnknownModelError(
            f"{where}: {name} is {path}, which is not on this machine",
            "give --model FOLDER, that of such a checkpoint, or its sizes by --shape "
            "hidden_size=4096,num_hidden_layers=36,...",
        )
    return read_shape(path)


def _shape(text: str) -> ModelShape:
    said: dict[str, Any] = {"model_type": "qwen3"}
    for part in text.split(","):
        name, sign, value = part.strip().partition("=")
        if not sign or name not in {*ModelShape.__struct_fields__, "num_local_experts"}:
            names = ", ".join(ModelShape.__struct_fields__[:9])
            raise ConfigError(f"--shape {part.strip()}: not a size; give NAME=SIZE of {names} ...")
        said[name] = overrides.value_of(value)
    return shape_of(said, "--shape")


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {getattr(error, 'strerror', None) or error}; give a text file") from None


def _yaml(text: str) -> dict[str, Any]:
    """Return a YAML file's mapping; what is none is of no framework."""
    import msgspec.yaml

    try:
        said = msgspec.yaml.decode(text)
    except (msgspec.DecodeError, ImportError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}
