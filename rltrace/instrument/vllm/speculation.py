"""vLLM's speculation: the spans of guessing tokens and of verifying them, and what became of the guesses of a step.

Source read: one release of each line from 0.8.5 to 0.33. The older model runner guesses in a method of its own, from
0.9 on. The newer one has a speculator, whose class depends on the method; only when it is made is it known which.
"""

from __future__ import annotations

from typing import Any

from rltrace.hooks.arguments import attributes
from rltrace.hooks.patching import PatchSet, nothing_before

RUNNER = "vllm.v1.worker.gpu_model_runner"
NEWER_RUNNER = "vllm.v1.worker.gpu.model_runner"
"""Module of the newer model runner, V2."""
NEWER_VERIFIER = "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler.__call__"
SPECULATORS = tuple(
    f"vllm.v1.worker.gpu.spec_decode.{of_method}.propose"
    for of_method in (
        "dflash.speculator:DFlashSpeculator",
        "extract_hidden_states:ExtractHiddenStatesSpeculator",
        "multi_module_mtp.speculator:MultiModuleMTPSpeculator",
        "ngram.speculator:NgramGPUSpeculator",
        "standalone_ar.speculator:StandaloneARSpeculator",
        "target_dependent_ar.speculator:TargetDependentARSpeculator",
    )
)
"""What guesses in the last release that was read: `make digests` reads these, of which a run hooks the one it has."""

READ = (
    *attributes("vllm.v1.core.sched.output:SchedulerOutput", "scheduled_spec_decode_tokens"),
    *attributes("vllm.v1.outputs:ModelRunnerOutput", "sampled_token_ids", "req_id_to_index"),
    *attributes("vllm.v1.request:Request", "is_finished"),
)
"""What `guessed` reads."""


def name_hooks(patches: PatchSet) -> None:
    """Name the hooks of whichever model runner is imported."""
    patches.when_imported(RUNNER, lambda _: name_older_hooks(patches))
    patches.when_imported(NEWER_RUNNER, lambda _: name_newer_hooks(patches))


def name_older_hooks(patches: PatchSet) -> None:
    """Name the older runner's hooks; the first releases guess in the middle of a function."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if hasattr(GPUModelRunner, "propose_draft_token_ids"):
        patches.span(f"{RUNNER}:GPUModelRunner.propose_draft_token_ids", "engine.draft")
    patches.span("vllm.v1.sample.rejection_sampler:RejectionSampler.forward", "engine.verify")


def name_newer_hooks(patches: PatchSet) -> None:
    """Name the newer runner's hooks; up to 0.17 it verifies in a function."""
    from vllm.v1.worker.gpu import model_runner

    def meet(_token: Any, speculator: Any, error: BaseException | None) -> None:
        if error is None:
            name_draft_hook(patches, draft_of(type(speculator)))

    patches.around(f"{NEWER_RUNNER}:init_speculator", nothing_before, meet)
    is_function = hasattr(model_runner, "rejection_sample")
    patches.span(f"{NEWER_RUNNER}:rejection_sample" if is_function else NEWER_VERIFIER, "engine.verify")


def draft_of(speculator: type) -> str:
    """Return the method by which a speculator guesses, where it is defined."""
    owner = next(owner for owner in speculator.__mro__ if "propose" in vars(owner))
    return f"{owner.__module__}:{owner.__qualname__}.propose"


def name_draft_hook(patches: PatchSet, target: str) -> None:
    """Name the hook on a speculator's guess."""
    patches.span(target, "engine.draft", draft_args)


def draft_args(*_: Any, dummy_run: bool = False, **__: Any) -> dict[str, Any] | None:
    """Return no arguments, and no span for a guess about nothing, by which a warm-up keeps ranks in step."""
    return None if dummy_run else {}


def guessed(scheduler: Any, output: Any, answer: Any) -> dict[str, int]:
    """Return how many tokens a draft had guessed for a step, and how many of them the model has accepted.

    Of each request with a draft the model samples one token more than it accepts. As vLLM counts: without the guesses
    for requests that have ended meanwhile, and without those that a grammar forbids. Without drafts nothing is said.

    Args:
        scheduler: It has the requests that have not ended.
        output: What the scheduler had decided.
        answer: What the model runner has made of it.
    """
    drafts = getattr(output, "scheduled_spec_decode_tokens", None)
    if not drafts or answer is None:
        return {}
    sampled, places = answer.sampled_token_ids, answer.req_id_to_index
    forbidden = getattr(output, "num_invalid_spec_tokens", None) or {}
    own_tokens = getattr(scheduler, "num_sampled_tokens_per_step", 1)  # 0: a model that refines all of them at once
    drafted = accepted = 0
    for request, tokens in drafts.items():
        if request not in places or not is_running(scheduler, request):
            continue
        sampled_tokens = len(sampled[places[request]])
        if sampled_tokens or not own_tokens:
            drafted += len(tokens) - forbidden.get(request, 0)
            accepted += max(sampled_tokens - own_tokens, 0)
    return {"drafted": drafted, "accepted": accepted}


def is_running(scheduler: Any, request_id: str) -> bool:
    """Tell whether a request has not ended since the step was scheduled."""
    request = scheduler.requests.get(request_id)
    return request is not None and not request.is_finished()
