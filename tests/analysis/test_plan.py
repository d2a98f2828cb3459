"""`rltrace.analysis.plan`: shapes, torch's allocator, and plans beside what shipped Recordings measured."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import shipped

from rltrace.analysis.plan import engine, overrides, settings_reference, settings_verl
from rltrace.analysis.plan.allocator import CachingAllocator
from rltrace.analysis.plan.beside import Beside, beside
from rltrace.analysis.plan.cards import CARDS, card_of
from rltrace.analysis.plan.measured import Measured, of_summary, with_engine
from rltrace.analysis.plan.phases import run as run_of
from rltrace.analysis.plan.plan import DOES_NOT_FIT, FITS, REFUSES, Plan, plan
from rltrace.analysis.plan.settings import Settings
from rltrace.analysis.plan.shapes import ModelShape, read_shape, shape_of
from rltrace.analysis.plan.trainer import Trainer
from rltrace.analysis.plan.training import Walk, walk
from rltrace.analysis.summary import Summary
from rltrace.errors import ConfigError

MEBIBYTE = 1 << 20
QWEN3_8B = ModelShape(
    vocab_size=151936,
    hidden_size=4096,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=12288,
)
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied, with biases": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "mistral": {"head_dim": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 48, "decoder_sparse_step": 2},
    "qwen3": {},
    "qwen3 tied, of other heads": {"head_dim": 48, "tie_word_embeddings": True},
    "qwen3_moe": EXPERTS | {"mlp_only_layers": [1], "head_dim": 16},
}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """A model's parameters have the names and shapes that transformers gives them, tied ones once."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    family = name.split()[0]
    config = transformers.AutoConfig.for_model(family, **SIZES, **MODELS[name])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    config.save_pretrained(tmp_path)
    shape = read_shape(str(tmp_path))
    assert shape.parameters() == {name: tuple(each.shape) for name, each in model.named_parameters()}
    assert shape.count() == sum(each.numel() for each in model.parameters())


def test_known_counts() -> None:
    """Models that everybody knows have the number of parameters that their cards say."""
    assert QWEN3_8B.count() == 8_190_735_360
    llama = {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32}
    llama |= {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
    assert shape_of(llama, "").count() == 8_030_261_248
    moe = {"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48}
    moe |= {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144}
    moe |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    assert shape_of(moe, "").count() == 30_532_122_624


def test_allocator_rounds_and_shares_segments() -> None:
    """Small blocks share 2 MiB, middle ones 20 MiB, and a large one has its own segment."""
    allocator = CachingAllocator()
    for size in (1, 600, MEBIBYTE // 2):
        allocator.allocate(size)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (512 + 1024 + MEBIBYTE // 2, 2 * MEBIBYTE)
    allocator.allocate(3 * MEBIBYTE)
    allocator.allocate(9 * MEBIBYTE)
    assert allocator.reserved_bytes == 22 * MEBIBYTE
    allocator.allocate(11 * MEBIBYTE + 1)
    assert allocator.reserved_bytes == 34 * MEBIBYTE


@pytest.mark.parametrize("is_expandable", [False, True])
def test_allocator_reuses_what_is_free(is_expandable: bool) -> None:
    """Freed neighbours are one block again, for their own stream only, until the cache is emptied."""
    allocator = CachingAllocator(is_expandable)
    blocks = [allocator.allocate(40 * MEBIBYTE)]
    allocator.release(blocks.pop())
    halves = [allocator.allocate(20 * MEBIBYTE) for _ in range(2)]
    assert allocator.reserved_bytes == 40 * MEBIBYTE
    for block in halves:
        allocator.release(block)
    whole = allocator.allocate(40 * MEBIBYTE)
    assert allocator.reserved_bytes == 40 * MEBIBYTE
    allocator.allocate(20 * MEBIBYTE, "another stream")
    assert allocator.reserved_bytes == 60 * MEBIBYTE
    allocator.release(whole)
    allocator.empty_cache()
    assert allocator.reserved_bytes == allocator.held_bytes == 20 * MEBIBYTE


def test_expandable_segment_grows_at_its_end() -> None:
    """A free block at the end of a segment that expands is made larger; elsewhere a new segment is."""
    grown, apart = CachingAllocator(is_expandable=True), CachingAllocator()
    for allocator in (grown, apart):
        allocator.allocate(20 * MEBIBYTE)
        allocator.release(allocator.allocate(40 * MEBIBYTE))
        allocator.allocate(60 * MEBIBYTE)
    assert grown.reserved_bytes == 80 * MEBIBYTE
    assert apart.reserved_bytes == 120 * MEBIBYTE


def summary_of(name: str) -> tuple[dict[str, Any], Summary]:
    """Return the manifest and the figures of a shipped Recording."""
    file = shipped.RECORDINGS / name
    return shipped.opened(file).manifest, shipped.summary_of(file)


def settings_of(name: str, card: str) -> Settings:
    """Return what a shipped Recording was made with."""
    manifest, _ = summary_of(name)
    if manifest["config"]:
        return settings_reference.settings(manifest["config"], CARDS[card])
    return settings_verl.settings(overrides.hydra(manifest["command"]), CARDS[card], QWEN3_8B, name)


SHIPPED = ("qwen3_8b_4gpu.zip", "qwen3_8b_4gpu_other_host.zip", "verl_8b_4gpu.zip")


@cache
def planned(name: str) -> Plan:
    """Return the plan of a shipped Recording, of its settings and the card alone."""
    return plan(settings_of(name, "H200"))


def rows_of(name: str, rank: int) -> list[Beside]:
    """Return every figure of a plan beside that of one rank."""
    _, summary = summary_of(name)
    return list(beside(planned(name), summary.memory[rank]))


@pytest.mark.parametrize("name", SHIPPED)
def test_plans_are_near_what_was_measured(name: str) -> None:
    """Without the Recording, each owner at the end of each phase, each phase and the peak are within 5 % or 512 MiB."""
    for rank in range(4):
        rows = rows_of(name, rank)
        assert len(rows) >= 70
        assert not [row for row in rows if not row.is_within]
        peak = rows[0]
        assert abs(peak.planned_bytes - peak.measured_bytes) < 0.01 * peak.measured_bytes


def test_a_plan_names_the_fullest_phase() -> None:
    """The phase of the peak is the one that was measured."""
    name = "qwen3_8b_4gpu.zip"
    assert planned(name).peak_phase == summary_of(name)[1].memory[0].peak_phase == "rollout.generate"
    assert planned(name).verdict == FITS


def test_owners_add_up() -> None:
    """The owners at the peak are the peak, and what is left is the rest of the card."""
    found = planned("qwen3_8b_4gpu.zip")
    assert sum(owner.bytes for owner in found.owners.values()) == found.peak_bytes
    assert found.peak_bytes + found.headroom_bytes == found.card_bytes
    for phase in found.phases:
        assert sum(phase.bytes.values()) == phase.used_bytes == found.card_bytes - phase.free_bytes
        assert phase.least_bytes <= phase.used_bytes


def test_a_recording_makes_a_plan_nearer() -> None:
    """What a Recording measured of contexts and communicators replaces figures of other machines."""
    name = "qwen3_8b_4gpu_other_host.zip"
    known = of_summary(name, summary_of(name)[1])
    assert known is not None
    found = plan(settings_of(name, "H200"), known)
    assert found.owners["nccl"].bytes == known.bytes["nccl"]
    assert found.recording == name
    sync = next(one for one in found.durations if one.phase == "weight_sync")
    assert 0.08 < sync.least_seconds == sync.most_seconds < 0.11


@pytest.mark.parametrize("name", SHIPPED)
def test_an_engines_own_figures_size_its_kv_cache(name: str) -> None:
    """What vLLM took off its KV cache in a Recording makes the planned one that of the Recording, to a block."""
    settings = settings_of(name, "H200")
    known = of_summary(name, summary_of(name)[1])
    assert known is not None and settings.engine is not None
    own = with_engine(known, settings.engine)
    kv_bytes = run_of(msgspec.structs.replace(settings, card=known.card), own).kv_bytes
    assert kv_bytes == pytest.approx(
        known.kv_cache_bytes, abs=2 * engine.kv_block_bytes(settings.engine) + 72 * MEBIBYTE
    )
    weights = plan(settings, own).owners["rollout.weights"]
    assert (weights.bytes, weights.source) == (known.weights_bytes, f"measured in {name}")


def test_segments_that_are_kept_are_counted() -> None:
    """What stays reserved after the cache was emptied is that of runs: 279, 154 and 7 MiB, and little for 8B."""
    middle = msgspec.structs.replace(
        QWEN3_8B, hidden_size=2048, num_hidden_layers=28, num_attention_heads=16, intermediate_size=6144,
        tie_word_embeddings=True,
    )  # fmt: skip
    left = [
        walk(
            Trainer(
                model=model,
                shards=shards,
                sequences=batch,
                log_prob_sequences=batch,
                sequence_tokens=256,
                ref_offload=True,
            )
        ).left.bytes
        for model, shards, batch in ((middle, 1, 4), (middle, 2, 8), (middle, 2, 2), (QWEN3_8B, 4, 2))
    ]
    measured = [279, 154, 7, 10]
    assert left == [pytest.approx(size * MEBIBYTE, abs=24 * MEBIBYTE) for size in measured]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"shards": 1, "param_bytes": 2},
        {"ref_offload": True, "offload": True},
        {"is_expandable": True, "recompute": False},
        {"is_gathered": False, "replicas": 2},
        {"wraps_embedding": True, "root_reshards": True, "log_prob_sequences": 3},
    ],
)
def test_layers_that_repeat_are_left_out(values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that leave all as it was before some of them are not walked through again, and nothing else changes."""
    usual: dict[str, Any] = {"model": QWEN3_8B, "shards": 4, "sequences": 2, "sequence_tokens": 300}
    trainer = Trainer(**usual | values)
    found = walk.__wrapped__(trainer)
    monkeypatch.setattr(Walk, "_state", lambda *_: (object(),))
    assert walk.__wrapped__(trainer) == found


def changed(settings: Settings, **engine_values: Any) -> Settings:
    """Return settings of which the engine's are others."""
    assert settings.engine is not None
    return msgspec.structs.replace(settings, engine=msgspec.structs.replace(settings.engine, **engine_values))


@pytest.fixture(scope="module")
def reference() -> Settings:
    """Return the settings of the shipped 8B run, on a card of 80 GB."""
    return settings_of("qwen3_8b_4gpu.zip", "H100")


def ceiling(found: Plan, ending: str) -> Any:
    """Return how far the setting of this name can go."""
    return next(one for one in found.ceilings if one.setting.endswith(ending))


def test_the_ceiling_fits_and_more_does_not(reference: Settings) -> None:
    """The largest share fits by the plan itself; a step more does not, in the phase that was named."""
    largest = ceiling(plan(reference), "gpu_memory_utilization")
    at = plan(changed(reference, gpu_memory_utilization=largest.largest))
    above = plan(changed(reference, gpu_memory_utilization=largest.largest + 0.002))
    assert (at.verdict == DOES_NOT_FIT, at.fails_in) == (False, None)
    assert (above.verdict, above.fails_in) == (DOES_NOT_FIT, largest.limited_by)
    tightest = min(above.phases, key=lambda phase: above.card_bytes - phase.least_bytes)
    assert tightest.phase == largest.limited_by
    assert largest.recommended < largest.largest


def test_an_engine_that_never_sleeps_ends_the_first_update(reference: Settings) -> None:
    """Where the engine stays awake, memory runs out when the optimizer makes its states, not in the sync before it."""
    awake = plan(changed(reference, sleep_level=0, is_staged=False, gpu_memory_utilization=0.6))
    assert (awake.verdict, awake.fails_in) == (DOES_NOT_FIT, "actor.update")
    relaunched = changed(reference, sleep_level=0, is_staged=False, is_relaunched=True, gpu_memory_utilization=0.6)
    away = msgspec.structs.replace(relaunched.trainer, offload=True)
    assert plan(msgspec.structs.replace(relaunched, trainer=away)).verdict == FITS


def test_buckets_that_are_kept_are_there_in_the_update(reference: Settings) -> None:
    """Buckets that stay from step to step are an owner in every phase after the sync."""
    assert reference.sync is not None
    keeping = msgspec.structs.replace(reference.sync, keeps=True)
    for settings, is_kept in ((reference, False), (msgspec.structs.replace(reference, sync=keeping), True)):
        held = {one.phase: one.bytes.get("weight_sync.bucket", 0) for one in plan(settings).phases}
        assert held["weight_sync"] == 1024 * MEBIBYTE
        assert held["actor.update"] == held["rollout.generate"] == is_kept * 1024 * MEBIBYTE


def test_offloading_gives_its_bytes_to_the_kv_cache(reference: Settings) -> None:
    """Parameters and states that are away leave room for their size; in the update they are back."""
    away = msgspec.structs.replace(reference, trainer=msgspec.structs.replace(reference.trainer, offload=True))
    stay, gone = ({one.phase: one for one in plan(each).phases} for each in (reference, away))
    states = stay["rollout.generate"].bytes["actor.params"] + stay["rollout.generate"].bytes["actor.optimizer"]
    less = stay["rollout.generate"].least_bytes - gone["rollout.generate"].least_bytes
    assert less == pytest.approx(states, rel=0.01)
    assert "actor.optimizer" not in gone["weight_sync"].bytes
    assert gone["actor.update"].least_bytes == pytest.approx(stay["actor.update"].least_bytes, rel=0.02)


def test_an_engine_that_asks_for_too_much_is_refused(reference: Settings) -> None:
    """A share that is not free when the engine starts is refused, and so is one that leaves no room for a sequence."""
    assert plan(changed(reference, gpu_memory_utilization=0.99)).verdict == REFUSES
    assert plan(changed(reference, gpu_memory_utilization=0.1)).verdict == REFUSES


def test_buckets_and_micro_batches_have_ceilings(reference: Settings) -> None:
    """At the largest bucket and micro-batch the plan still fits; one more sequence does not."""
    long = msgspec.structs.replace(
        reference, most_sequences=256, trainer=msgspec.structs.replace(reference.trainer, sequence_tokens=4096)
    )
    most = ceiling(plan(long), "micro_batch").largest
    assert 1 < most < 256

    def verdict(sequences: int) -> str:
        trainer = msgspec.structs.replace(long.trainer, sequences=sequences)
        return plan(msgspec.structs.replace(long, trainer=trainer)).verdict

    assert (verdict(most) == DOES_NOT_FIT, verdict(most + 1)) == (False, DOES_NOT_FIT)


def test_a_larger_bucket_than_the_ceiling_does_not_fit(reference: Settings) -> None:
    """With four buckets at once, the largest size fits, and a larger one does not."""
    assert reference.sync is not None
    sync = msgspec.structs.replace(reference.sync, buckets=4)

    def with_bucket(mebibytes: float) -> Plan:
        sized = msgspec.structs.replace(sync, bucket_bytes=int(mebibytes * MEBIBYTE))
        return plan(msgspec.structs.replace(reference, sync=sized))

    largest = ceiling(with_bucket(512), "bucket_megabytes").largest
    assert with_bucket(largest).verdict != DOES_NOT_FIT
    assert with_bucket(largest + 64).verdict == DOES_NOT_FIT


SMALL = ModelShape(
    vocab_size=32000,
    hidden_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=1536,
)


def peak(**values: Any) -> int:
    """Return the most that torch hands out to a small trainer in an update."""
    trainer = Trainer(model=SMALL, sequences=4, log_prob_sequences=4, sequence_tokens=512, **values)
    return sum(walk(trainer).stages["actor.update"].most.owners.values())


def test_settings_of_a_trainer_change_its_peak() -> None:
    """Each setting that is said to save memory does, in the order of what it gives."""
    usual = peak()
    assert peak(shards=4) < usual
    assert peak(trained=10_000) < usual - 12 * SMALL.count() // 2
    assert peak(recompute=False) > usual + 50 * MEBIBYTE
    assert peak(param_bytes=2, optimizer_bytes=2) < usual
    assert peak(optimizer_is_foreach=True) >= usual
    assert peak(ref_offload=True) < peak(ref_offload=False)
    assert peak(is_gathered=False, replicas=2) > peak(is_gathered=False)


def test_kv_cache_is_what_the_share_leaves(reference: Settings) -> None:
    """The KV cache grows by the share of CUDA's total, in whole blocks."""
    own = reference.engine
    assert own is not None
    beside_it = engine.beside_kv_cache(own)
    more = msgspec.structs.replace(own, gpu_memory_utilization=own.gpu_memory_utilization + 0.1)
    total = reference.card.cuda_bytes
    grown = engine.kv_cache(more, total, beside_it) - engine.kv_cache(own, total, beside_it)
    assert grown == pytest.approx(0.1 * total, abs=engine.kv_block_bytes(own) + 36 * 2 * MEBIBYTE)


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not known"),
        ({"model_type": "qwen3"}, "does not say vocab_size"),
        ({"model_type": "llama", **SIZES, "num_key_value_heads": 3}, "do not divide over num_key_value_heads: 3"),
        ({"model_type": "llama", **SIZES, "hidden_size": 0, "head_dim": 8}, "hidden_size is 0"),
    ],
)
def test_wrong_shapes_are_said_in_one_line(said: dict[str, Any], wrong: str) -> None:
    """A shape that cannot be is refused with both values and what to give."""
    with pytest.raises(ConfigError, match="; give ") as error:
        shape_of(said, "config.json")
    assert wrong in str(error.value)


def test_an_unknown_card_is_refused() -> None:
    """A card is known by its name or its size."""
    assert card_of("NVIDIA H100").total_bytes == 81_559 * MEBIBYTE
    assert card_of("80GiB").total_bytes == 80 << 30
    with pytest.raises(ConfigError, match="give one of A10, A100"):
        card_of("GTX9")


def test_measured_needs_a_gpu() -> None:
    """A Recording without a GPU tells nothing."""
    _, summary = summary_of("qwen3_8b_4gpu.zip")
    assert of_summary("run", msgspec.structs.replace(summary, memory=[])) is None
    assert isinstance(of_summary("run", summary), Measured)
