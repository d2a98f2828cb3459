"""What a step of TRL's GRPOTrainer consists of: a batch is generated and scored, then learned from.

A step begins where the trainer says so, and ends where the next one begins: to log, to save, to evaluate and to fetch
the next batch is a part of it.
"""

from __future__ import annotations

from typing import Any

from rltrace.events import STEP
from rltrace.hooks.arguments import argument
from rltrace.instrument.trl.held_phases import HeldPhases
from rltrace.record import spans

GENERATIONS = ("transformers.generate", "transformers.generate_batch", "vLLM.generate")
"""What TRL's own profile calls the generation proper, without tokenizing and waking up around it."""
OF_BATCH = ("rollout.generate", "reward", "advantage", "ref.log_prob", "actor.old_log_prob")
OF_UPDATE = ("actor.micro_batch", "actor.update")


class StepPhases:
    """What is open in the step of this process.

    What TRL does in the middle of a function has no call of its own to wrap: the advantages are computed from the end
    of the rewards to the end of the batch, and the update goes from the first loss to the end of the step, so that the
    optimizer is in it.
    """

    def __init__(self) -> None:
        self._open = HeldPhases()
        self._makes_batch = False
        """Whether a batch is being generated and scored."""
        self._is_ref = False
        """Whether the actor stands in for the ref: with adapters there is no other."""

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a step, and with that end the last one."""
        state = argument("state", 2, args, kwargs)
        self._open.close(*OF_UPDATE, *OF_BATCH, STEP)
        self._open.open(STEP, step=state.global_step)

    def end_update(self, _token: Any, _result: Any, _error: BaseException | None) -> None:
        """End the update: the optimizer has stepped."""
        self._open.close(*OF_UPDATE)

    def end_last(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """End the last step: all is learned, and the trainer is about to tell everybody."""
        self._open.close(*OF_UPDATE, STEP)

    def end_training(self, _token: Any, _result: Any, error: BaseException | None) -> None:
        """End what an error has left open."""
        self._open.close(*OF_UPDATE, *OF_BATCH, STEP, error=error)

    def begin_generate(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """Begin a phase if what TRL begins to profile is a generation."""
        if args[0].name.partition(".")[2] in GENERATIONS:
            self._open.open("rollout.generate")

    def end_generate(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """End the phase of a generation that TRL has profiled."""
        if args[0].name.partition(".")[2] in GENERATIONS:
            self._open.close("rollout.generate")

    def begin_batch(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        """Begin a batch, which is generated and scored; between two micro-batches this interrupts the update."""
        self._open.close("actor.update")
        self._makes_batch = True
        return args[0]

    def end_batch(self, trainer: Any, _result: Any, error: BaseException | None) -> None:
        """End a batch: its advantages are known."""
        self._open.close("advantage", error=error)
        self._makes_batch = False
        if error is None and trainer.model.training:
            spans.counter("reward_mean", trainer._metrics["train"]["reward"][-1])

    def begin_adapter(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """Note that the actor stands in for the ref, without its adapter."""
        self._is_ref = True

    def end_adapter(self, _token: Any, _result: Any, _error: BaseException | None) -> None:
        """Note that it is the actor again."""
        self._is_ref = False

    def begin_log_prob(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin the phase of a batch's log-probs, of the actor or of the ref; those of a loss belong to the update."""
        if self._makes_batch:
            trainer, model = args[0], argument("model", 1, args, kwargs)
            is_ref = self._is_ref or (trainer.ref_model is not None and model is trainer.ref_model)
            name = "ref.log_prob" if is_ref else "actor.old_log_prob"
            self._open.open(name)

    def end_log_prob(self, _token: Any, _result: Any, error: BaseException | None) -> None:
        """End the phase of log-probs."""
        self._open.close("ref.log_prob", "actor.old_log_prob", error=error)

    def begin_reward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin the phase in which the answers of a batch are scored."""
        inputs = argument("inputs", 1, args, kwargs)
        self._open.open("reward", sequences=len(inputs))

    def end_reward(self, _token: Any, _result: Any, error: BaseException | None) -> None:
        """End the rewards; what follows until the end of the batch makes advantages of them."""
        self._open.close("reward", error=error)
        if error is None:
            self._open.open("advantage")

    def begin_update(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """Begin a micro-batch with its loss; the first one of a step begins the update, and an evaluation has none."""
        if not args[0].model.training or STEP not in self._open:
            return
        if "actor.update" not in self._open:
            self._open.open("actor.update")
        self._open.open("actor.micro_batch")

    def end_micro_batch(self, _token: Any, _result: Any, error: BaseException | None) -> None:
        """End a micro-batch: its backward is over."""
        self._open.close("actor.micro_batch", error=error)
