"""SGLang's requests: from the scheduler's queue to the last token, with the first one and with prefix hits.

Source read: SGLang 0.4.6 to 0.5.23; 0.5.12 was run. A request that waits for its grammar is queued when that is there.
Of an engine's schedulers the first one of each group that shares its requests records them: the others have the same.
"""

from __future__ import annotations

from typing import Any

from rltrace.hooks.arguments import attributes, keep
from rltrace.hooks.patching import PatchSet
from rltrace.hooks.request_spans import Requests

SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"
REQ = "sglang.srt.managers.schedule_batch:Req"
READ = attributes(REQ, "rid", "output_ids", "origin_input_ids", "cached_tokens", "finished_reason")
WAITING = attributes(SCHEDULER, "waiting_queue")


class SchedulerRequests:
    """The requests of one scheduler process."""

    def __init__(self) -> None:
        self._requests = Requests()
        self.is_recording = True
        """Whether this scheduler is the first of those that have the same requests."""

    def name_hooks(self, patches: PatchSet) -> None:
        """Name the hooks on the queue; batches tell the rest."""
        patches.around(f"{SCHEDULER}._add_request_to_queue", keep("req", 1), self.begin, reads=READ)
        patches.around(f"{SCHEDULER}.abort_request", self.before_abort, self.after_abort, reads=(*READ, *WAITING))

    def become(self, server_args: Any, tp_rank: int, pp_rank: int) -> None:
        """Note which scheduler this process is.

        Args:
            server_args: What the engine was started with.
            tp_rank: Rank among the schedulers of a tensor-parallel group, in which data-parallel attention makes parts
                with requests of their own.
            pp_rank: Rank among those of a pipeline.
        """
        parts = server_args.dp_size if getattr(server_args, "enable_dp_attention", False) else 1
        self.is_recording = pp_rank == 0 and tp_rank % max(1, server_args.tp_size // parts) == 0

    def begin(self, request: Any, _result: Any, error: BaseException | None) -> None:
        """Begin a request that was queued, unless the queue had no room for it."""
        if error is None and self.is_recording and request.finished_reason is None:
            self._requests.begin(request.rid)

    def scheduled(self, batch: Any, at_ns: int) -> None:
        """Note that a batch that began then computes the prompts of its requests."""
        for request in batch.reqs if self.is_recording else ():
            self._requests.scheduled(request.rid, at_ns, request.cached_tokens)

    def processed(self, batch: Any) -> None:
        """Note which requests of a batch have their first token now, and end those that are done."""
        if not self._requests.in_flight:
            return
        if self._requests.without_token:
            for request in batch.reqs:
                if request.output_ids:
                    self._requests.has_token(request.rid)
        for request in batch.reqs:
            if request.finished_reason is not None:  # an overlapped batch has it once more
                self._end(request)

    def before_abort(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        """Keep the scheduler, and the requests that wait: an aborted one leaves without a batch."""
        return args[0], list(args[0].waiting_queue) if self._requests.in_flight else []

    def after_abort(self, token: Any, _result: Any, _error: BaseException | None) -> None:
        """End those that have left."""
        scheduler, waited = token
        still = set(map(id, scheduler.waiting_queue))
        for request in waited:
            if id(request) not in still:
                self._end(request, aborted=True)

    def _end(self, request: Any, **how: Any) -> None:
        self._requests.end(
            request.rid, prompt_tokens=len(request.origin_input_ids), tokens=len(request.output_ids), **how
        )
