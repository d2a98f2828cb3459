"""The configuration of a run: read from YAML, and checked completely before any process is started or file is made.

A wrong configuration is a `ConfigError` of one line: file, key, what is wrong with both values, and the next step.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import yaml

from rltrace.errors import ConfigError

BF16_BYTES = 2
CHECKPOINT_DEFAULTS = {"tie_word_embeddings": False, "rope_theta": 10000.0, "initializer_range": 0.02}
"""What a Qwen3 checkpoint's `config.json` means by keys that it does not have."""
MEBIBYTE = 1 << 20
SMALLEST_PART_BYTES = 128
"""Smallest part of a bucket for one rank: see `weight_sync.ALIGNMENT`."""

Positive = Annotated[int, msgspec.Meta(ge=1)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
Fraction = Annotated[float, msgspec.Meta(ge=0, lt=1)]


ENGINES = {"cpu": ("embedded",), "cuda": ("vllm", "sglang")}
"""The engines that run on a device."""


class UnmetNeedError(ConfigError):
    """A configuration that can run, and a machine that lacks what it needs."""

    def __init__(self, message: str, lacks: str) -> None:
        """Args:
        message: The whole line, as of any other error.
        lacks: What is lacking, in a few words.
        """
        super().__init__(message)
        self.lacks = lacks


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of the file; an unknown key is an error."""


class ModelConfig(Section, frozen=True):
    """Shape of the Qwen3 model, in the words of transformers; or the folder of a checkpoint that says it."""

    path: str | None = None
    """Folder with `config.json` and safetensors; the sizes below are then read from it."""
    vocab_size: Positive = 16
    hidden_size: Positive = 64
    num_hidden_layers: Positive = 2
    num_attention_heads: Positive = 4
    num_key_value_heads: Positive = 2
    head_dim: Positive = 16
    intermediate_size: Positive = 128
    rms_norm_eps: PositiveFloat = 1e-6
    rope_theta: PositiveFloat = 10000.0
    tie_word_embeddings: bool = True
    initializer_range: PositiveFloat = 0.02
    init: Literal["auto", "broadcast", "sharded"] = "auto"
    """Where first weights come from: rank 0 builds and broadcasts them, or every rank draws its own shards in place, so
    that nobody ever holds the model. `auto`: broadcast a checkpoint, and everything on a CPU."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return every parameter's shape by its name in a checkpoint, tied ones once."""
        hidden, inter = self.hidden_size, self.intermediate_size
        heads, kv_heads = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.weight": (heads, hidden),
            "self_attn.k_proj.weight": (kv_heads, hidden),
            "self_attn.v_proj.weight": (kv_heads, hidden),
            "self_attn.o_proj.weight": (hidden, heads),
            "self_attn.q_norm.weight": (self.head_dim,),
            "self_attn.k_norm.weight": (self.head_dim,),
            "mlp.gate_proj.weight": (inter, hidden),
            "mlp.up_proj.weight": (inter, hidden),
            "mlp.down_proj.weight": (hidden, inter),
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for index in range(self.num_hidden_layers):
            shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def kv_bytes_per_token(self) -> int:
        """Return bytes of keys and values of one token over all layers."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * BF16_BYTES


class TaskConfig(Section, frozen=True):
    """The count-down task: see `task.py`."""

    prompts: Positive = 32
    """Prompts of one step, over all ranks."""
    prompt_tokens: Annotated[int, msgspec.Meta(ge=2)] = 2
    """Length of a prompt; the rest beside the digit is filled with BOS."""


class RolloutConfig(Section, frozen=True):
    """The engine: how it samples, what memory it holds, how it sleeps."""

    n: Annotated[int, msgspec.Meta(ge=2)] = 16
    """Samples of one prompt: a group of one has no relative advantage."""
    max_tokens: Positive = 12
    """Most tokens of one response."""
    ignore_eos: bool = False
    """True: every response has exactly `max_tokens` tokens, so that steps can be compared."""
    temperature: PositiveFloat = 1.0
    engine: Literal["auto", "embedded", "vllm", "sglang"] = "auto"
    """`auto`: vLLM on GPUs, the embedded one on a CPU. SGLang runs on GPUs too."""
    slots: Positive = 128
    """Sequences that run at once on one rank; others wait."""
    kv_cache_megabytes: Annotated[float, msgspec.Meta(ge=64)] = 64.0
    """Embedded engine: size of the KV pool of one rank in MiB, divided evenly over the slots."""
    gpu_memory_utilization: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.25
    """vLLM: part of the GPU for weights, KV cache and activations together. SGLang: part of what is free on the GPU
    when the engine starts, for weights and KV cache alone (its `mem_fraction_static`)."""
    enforce_eager: bool = False
    """vLLM and SGLang: True does without CUDA graphs."""
    max_model_len: Positive | None = None
    """vLLM and SGLang: longest sequence; by default prompt and response."""
    sleep_level: Literal[0, 1, 2] = 2
    """0 keeps everything, 1 keeps a host copy of the weights, 2 keeps nothing."""
    wake_up: Literal["staged", "all", "relaunch"] = "staged"
    """Staged: weights, then the sync, then the KV cache. All: both before the sync. Relaunch: nothing sleeps; the
    engine ends after every rollout, and the next one loads a checkpoint from disk."""
    sync: bool = True
    """If False, the engine keeps its initial weights forever (then `sleep_level` must be 0). For experiments."""
    bucket_megabytes: PositiveFloat = 0.0625
    """Size of a bucket of the weight sync in MiB."""
    buckets: Annotated[int, msgspec.Meta(ge=2)] = 2
    """How many buckets exist at a time: while one is loaded, others are gathered."""
    keep_buckets: bool = False
    """If True, the buckets stay allocated and mapped from step to step; if False, they are released after every
    sync."""


class ActorConfig(Section, frozen=True):
    """GRPO and its optimizer."""

    minibatches: Positive = 4
    """Optimizer steps of one step."""
    micro_batch: Positive = 64
    """Most sequences of one forward and backward on one rank."""
    learning_rate: PositiveFloat = 3.0e-3
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    max_grad_norm: PositiveFloat = 1.0
    clip_ratio: PositiveFloat = 0.2
    kl_coefficient: Annotated[float, msgspec.Meta(ge=0)] = 1.0e-3
    offload: bool = False
    """Keep parameters and optimizer state elsewhere while the actor does not use them: on GPUs in pinned host memory,
    on a CPU in a file."""


class RefConfig(Section, frozen=True):
    """The initial policy that the KL term holds the actor to."""

    offload: bool = True
    """Keep its shards in host memory (pinned, if there is a GPU) and copy them layer by layer."""


class KernelsConfig(Section, frozen=True):
    """Steps whose operators and kernels are recorded one by one; they take longer than the others."""

    steps: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = ()


class AllocationsConfig(Section, frozen=True):
    """On GPUs: steps whose allocations are all recorded; they take a little longer, and writing them takes longer
    still."""

    steps: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = ()


class Config(Section, frozen=True):
    """A whole run; every key has a default, so that a file only says what it changes."""

    ranks: Positive = 2
    steps: Positive = 24
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The engine, transport and collectives follow from it. `auto`: cuda if there is a GPU."""
    ray_address: str | None = None
    """`host:port` of a Ray cluster for the ranks, which fill one node before the next; by default RAY_ADDRESS, else a
    private Ray on this machine."""
    otlp: str | bool = False
    """URL of an OpenTelemetry collector that the run is sent to while it goes on; `true`: where the OTEL_ variables
    say."""
    memory_limit_megabytes: PositiveFloat | None = None
    """On a CPU: how many MiB worker and engine of a rank may hold together, beyond what they held before their models
    existed. What goes beyond it fails, as on a GPU that is full. By default there is no limit."""
    force: bool = False
    """Try versions of vLLM and SGLang that this has not been run with, and GPUs that others use too."""
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    rollout: RolloutConfig = RolloutConfig()
    actor: ActorConfig = ActorConfig()
    ref: RefConfig = RefConfig()
    kernels: KernelsConfig = KernelsConfig()
    allocations: AllocationsConfig = AllocationsConfig()

    @property
    def sequence_tokens(self) -> int:
        """Return the tokens of the longest sequence, prompt and response."""
        return self.task.prompt_tokens + self.rollout.max_tokens

    @property
    def prompts_per_rank(self) -> int:
        """Return the prompts that one rank's engine answers in a step."""
        return self.task.prompts // self.ranks

    @property
    def sequences_per_rank(self) -> int:
        """Return the sequences that one rank samples and learns from in a step."""
        return self.prompts_per_rank * self.rollout.n

    @property
    def bucket_bytes(self) -> int:
        """Return the size of one bucket in bytes."""
        return int(self.rollout.bucket_megabytes * MEBIBYTE)

    @property
    def kv_cache_bytes(self) -> int:
        """Return the size of one rank's KV pool in bytes."""
        return int(self.rollout.kv_cache_megabytes * MEBIBYTE)

    @property
    def memory_limit_bytes(self) -> int | None:
        """Return the limit of a rank's memory in bytes; None if there is none, or if it is the GPU's."""
        limit = self.memory_limit_megabytes
        return None if limit is None else int(limit * MEBIBYTE)

    @property
    def tokens_per_slot(self) -> int:
        """Return the tokens that one slot of the KV pool holds."""
        return self.kv_cache_bytes // (self.rollout.slots * self.model.kv_bytes_per_token())


def load(file: str | Path, *, vocabulary: int, force: bool = False) -> Config:
    """Load the configuration in a YAML file.

    Args:
        file: Path of the file.
        vocabulary: Token ids that the task uses.
        force: As the key of that name.

    Returns:
        The run with nothing left `auto`.

    Raises:
        ConfigError: the file cannot be read, has an unknown key or wrong type, or asks for the impossible.
        UnmetNeedError: it asks for an engine that runs on GPUs, and there is none.
    """
    path = Path(file)
    values = read_yaml(path)
    try:
        config = msgspec.convert(values, Config)
        config = msgspec.structs.replace(
            config, model=_with_checkpoint_sizes(config.model), force=config.force or force
        )
        asked, config = config, resolved(config)
        _check_needs(asked, config)
        _check_combinations(config, vocabulary)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_explain(str(error), values)}") from None
    except UnmetNeedError as error:
        raise UnmetNeedError(f"{path}: {error}", error.lacks) from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return config


def resolved(config: Config) -> Config:
    """Return the run with every `auto` decided by what this machine has."""
    device, model, rollout = config.device, config.model, config.rollout
    if device == "auto":
        device = "cuda" if _has_gpu() else "cpu"
    init = model.init
    if init == "auto":
        init = "broadcast" if device == "cpu" or model.path is not None else "sharded"
    engine = rollout.engine
    if engine == "auto":
        engine = "vllm" if device == "cuda" else "embedded"
    return msgspec.structs.replace(
        config,
        device=device,
        ray_address=config.ray_address or os.environ.get("RAY_ADDRESS") or None,
        model=msgspec.structs.replace(model, init=init),
        rollout=msgspec.structs.replace(rollout, engine=engine),
    )


def _has_gpu() -> bool:
    if not Path("/dev/nvidiactl").exists():  # torch takes seconds to import, and says the same
        return False
    import torch

    return bool(torch.cuda.is_available())


def _check_needs(asked: Config, config: Config) -> None:
    """Raise an UnmetNeedError if an engine of GPUs is asked for, and nobody said that there shall be none."""
    engine = config.rollout.engine
    if asked.device == "auto" and config.device == "cpu" and engine in ENGINES["cuda"]:
        lacks = f"{engine} needs a GPU"
        raise UnmetNeedError(
            f"rollout.engine: {lacks}, and torch sees none here; leave engine out, or use a machine with a GPU", lacks
        )


def _check_combinations(config: Config, vocabulary: int) -> None:
    """Raise a ConfigError for the first pair of values that cannot go together."""
    rollout, actor, model = config.rollout, config.actor, config.model
    if config.task.prompts % config.ranks:
        raise _impossible(
            "task.prompts",
            f"{config.task.prompts} prompts do not divide over ranks: {config.ranks}",
            f"use {_multiple(config.task.prompts, config.ranks)}",
        )
    if config.sequences_per_rank % actor.minibatches:
        raise _impossible(
            "actor.minibatches",
            f"{actor.minibatches} minibatches do not divide the {config.sequences_per_rank} sequences of a rank "
            f"(task.prompts {config.task.prompts} x rollout.n {rollout.n} / ranks {config.ranks})",
            f"use a divisor of {config.sequences_per_rank}",
        )
    least_bytes = config.ranks * SMALLEST_PART_BYTES
    if config.bucket_bytes < least_bytes:
        raise _impossible(
            "rollout.bucket_megabytes",
            f"a bucket of {config.bucket_bytes:,} bytes cannot hold {SMALLEST_PART_BYTES} of each of ranks: "
            f"{config.ranks}",
            f"use at least {least_bytes / MEBIBYTE:.6g}",
        )
    if rollout.engine not in ENGINES[config.device]:
        raise _impossible(
            "rollout.engine",
            f"{rollout.engine} does not run on device: {config.device}",
            "leave engine and device out: they are chosen together",
        )
    if model.init == "sharded" and model.path is not None:
        raise _impossible(
            "model.init", f"sharded draws random weights, and model.path names {model.path}", "use init: broadcast"
        )
    if rollout.wake_up == "relaunch" and (rollout.sleep_level != 0 or not rollout.sync):
        raise _impossible(
            "rollout.wake_up",
            f"relaunch with sleep_level: {rollout.sleep_level} and sync: {str(rollout.sync).lower()}; an engine that "
            "ends after every rollout does not sleep, and needs the weights",
            "use sleep_level: 0 and sync: true",
        )
    if config.memory_limit_megabytes is not None and config.device == "cuda":
        raise _impossible(
            "memory_limit_megabytes",
            f"{config.memory_limit_megabytes:g} with device: cuda, where the GPU is the limit",
            "leave it out",
        )
    longest = rollout.max_model_len
    if longest is not None and longest < config.sequence_tokens:
        raise _impossible(
            "rollout.max_model_len",
            f"{longest} tokens, a sequence needs {config.sequence_tokens} "
            f"(task.prompt_tokens {config.task.prompt_tokens} + rollout.max_tokens {rollout.max_tokens})",
            f"use at least {config.sequence_tokens}, or leave it out",
        )
    if rollout.engine == "embedded" and config.tokens_per_slot < config.sequence_tokens:
        sequence_bytes = config.sequence_tokens * model.kv_bytes_per_token() * rollout.slots
        raise _impossible(
            "rollout.kv_cache_megabytes",
            f"{rollout.kv_cache_megabytes:g} MiB over rollout.slots: {rollout.slots} hold {config.tokens_per_slot} "
            f"tokens a slot, a sequence needs {config.sequence_tokens}",
            f"use fewer slots, or at least {sequence_bytes / MEBIBYTE:.6g}",
        )
    if model.vocab_size < vocabulary:
        raise _impossible(
            "model.vocab_size",
            f"{model.vocab_size} tokens, the count-down task uses {vocabulary}",
            f"use at least {vocabulary}",
        )
    if model.num_attention_heads % model.num_key_value_heads:
        raise _impossible(
            "model.num_attention_heads",
            f"{model.num_attention_heads} heads do not share num_key_value_heads: {model.num_key_value_heads} evenly",
            f"use {_multiple(model.num_attention_heads, model.num_key_value_heads)}",
        )
    if model.head_dim % 2:
        raise _impossible(
            "model.head_dim",
            f"{model.head_dim} is odd, rotary embeddings turn pairs (of 2)",
            f"use {model.head_dim + 1}",
        )
    if not rollout.sync and rollout.sleep_level != 0:
        raise _impossible(
            "rollout.sleep_level",
            f"{rollout.sleep_level} with rollout.sync: false would leave the engine asleep without its weights",
            "use sleep_level: 0, or sync: true",
        )


def _with_checkpoint_sizes(model: ModelConfig) -> ModelConfig:
    """Return the model with the sizes that the checkpoint at `model.path` names, if there is one."""
    if model.path is None:
        return model
    file = Path(model.path) / "config.json"
    try:
        said: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise _impossible(
            "model.path", f"cannot read {file}: {error}", "name the folder of a Qwen3 checkpoint"
        ) from None
    if said.get("model_type") != "qwen3":
        raise _impossible(
            "model.path", f"{file} is of model_type {said.get('model_type')!r}, not 'qwen3'", "name a Qwen3 checkpoint"
        )
    rope = said.get("rope_parameters") or {}
    said = CHECKPOINT_DEFAULTS | {name: rope[name] for name in ("rope_theta",) if name in rope} | said
    if said.get("attention_bias") or rope.get("rope_type", "default") != "default":
        raise _impossible(
            "model.path",
            f"{file} has attention_bias {said.get('attention_bias')} and rope_type {rope.get('rope_type')}, "
            "the engine knows False and 'default'",
            "name another checkpoint",
        )
    sizes = [name for name in ModelConfig.__struct_fields__ if name not in ("path", "init")]
    missing = [name for name in sizes if name not in said]
    if missing:
        raise _impossible("model.path", f"{file} does not say {missing[0]}", "name a whole Qwen3 checkpoint")
    try:
        return msgspec.convert(
            {"path": model.path, "init": model.init} | {name: said[name] for name in sizes}, ModelConfig
        )
    except msgspec.ValidationError as error:
        raise _impossible("model.path", f"{file}: {error}", "name a whole Qwen3 checkpoint") from None


class _Loader(yaml.SafeLoader):
    """A loader that refuses equal keys: YAML's own keeps the last one silently."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping as it is written, before merge keys add to it, because those may be overridden."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        first: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            name = str(key.value)
            if name in first:
                raise _DuplicateKeyError(f"line {line}: {name}: given twice, first in line {first[name]}; keep one")
            first[name] = line
        return node


class _DuplicateKeyError(ConfigError):
    pass


def read_yaml(path: Path) -> Any:
    """Return what a YAML file holds.

    Raises:
        ConfigError: it cannot be read, or is not YAML, or gives a key twice.
    """
    try:
        values = yaml.load(path.read_text(), _Loader)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a YAML file such as examples/laptop.yaml") from None
    except _DuplicateKeyError as error:
        raise ConfigError(f"{path}: {error}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        what = ", ".join(filter(None, (error.context, error.problem)))
        raise ConfigError(f"{path}: {where}not YAML: {what}; compare with examples/laptop.yaml") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(f"{path}: not YAML: {text}; compare with examples/laptop.yaml") from None
    return {} if values is None else values


def _explain(message: str, values: Any) -> str:
    """Return one line from msgspec's message: the key, what it holds, what is expected, and the next step."""
    what, _, place = message.partition(" - at `$")
    key = place.rstrip("`").lstrip(".")
    unknown = re.search(r"unknown field `(.*)`", what)
    if unknown:
        names = ", ".join(_section_at(key).__struct_fields__)
        return f"{key + '.' if key else ''}{unknown[1]}: unknown key; use one of: {names}"
    found = _value_at(values, key)
    hint = f"change {key} in the file" if key else "write keys such as `steps: 24`"
    if choices := _choices(key):
        hint = f"use one of: {', '.join(map(str, choices))}"
    if isinstance(found, str) and "float" in what and _is_number(found):
        hint = f"write {float(found)!r}: YAML reads {found} as text"
    return f"{key or 'file'}: {what}, found {found!r}; {hint}"


def _section_at(key: str) -> type[Section]:
    kind = get_type_hints(Config).get(key)
    return kind if isinstance(kind, type) and issubclass(kind, Section) else Config


def _choices(key: str) -> tuple[Any, ...]:
    """Return the values that a key may have, if these are listed one by one."""
    section, _, name = key.rpartition(".")
    kind = get_type_hints(_section_at(section)).get(name)
    return get_args(kind) if get_origin(kind) is Literal else ()


def _value_at(values: Any, key: str) -> Any:
    for part in re.findall(r"[a-z_]+|\d+", key):
        values = values[int(part)] if part.isdigit() else values[part]
    return values


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _impossible(key: str, what: str, next_step: str) -> ConfigError:
    return ConfigError(f"{key}: {what}; {next_step}")


def _multiple(value: int, of: int) -> str:
    """Return the nearest multiples, as a next step."""
    below = value // of * of
    return f"{below} or {below + of}" if below else f"{of}"
