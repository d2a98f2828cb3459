"""Joins a rank's actor and engine, which share one device: inside, the engine is awake with the actor's weights."""

from __future__ import annotations

import time
from types import TracebackType

from rltrace_reference import device
from rltrace_reference.actor import Actor
from rltrace_reference.config import MEBIBYTE
from rltrace_reference.disk_reload import DiskReload
from rltrace_reference.rollout import Rollout
from rltrace_reference.strategy import Strategy
from rltrace_reference.weight_sync import EXCHANGES, DirectSender, Sender, SyncStats


class ShardingManager:
    """`with manager.at(step): rollout.generate(...)`; outside, the engine sleeps and the device is the actor's."""

    def __init__(self, actor: Actor, rollout: Rollout, sender_id: str) -> None:
        self.actor, self.rollout = actor, rollout
        self.config = rollout.config
        self.sender_id = sender_id
        self.sender = self.sender_of(
            Strategy(
                transport=device.transport_name(self.config),
                keep=self.config.rollout.keep_buckets,
                bucket_megabytes=self.config.rollout.bucket_megabytes,
                buckets=self.config.rollout.buckets,
            )
        )
        self.checkpoint = DiskReload(rollout)
        """The way of an engine that is launched for every rollout."""
        self.relaunches = self.config.rollout.wake_up == "relaunch"
        self.step = 0

    def start(self) -> None:
        """Start the engine and put it to sleep, so that the device is the actor's."""
        if self.relaunches:
            self.checkpoint.__enter__()
            self.rollout.end()
        else:
            self.rollout.start()  # last: vLLM measures what the GPU has left, and nobody else may allocate meanwhile
            if not self.config.rollout.sync:
                self.sync_weights()  # once: the initial weights, which the engine then keeps
            self.rollout.sleep(self.config.rollout.sleep_level)
        self.actor.offload()

    def close(self) -> None:
        """Remove the checkpoint."""
        if self.relaunches:
            self.checkpoint.__exit__(None, None, None)

    def sender_of(self, strategy: Strategy) -> Sender:
        """Return the sender that syncs in this way."""
        kind = DirectSender if strategy.direct else Sender
        return kind(
            self.rollout.channel,
            int(strategy.bucket_megabytes * MEBIBYTE),
            self.sender_id,
            device.transport(strategy.transport),
            strategy.buckets,
            strategy.keep,
            EXCHANGES[strategy.exchange],
        )

    def at(self, step: int) -> ShardingManager:
        """Return this manager, for the buckets of that step."""
        self.step = step
        return self

    def __enter__(self) -> ShardingManager:
        if self.config.rollout.sync:
            self.actor.onload()
            device.empty_cache(self.config)  # what training has left in the allocator is what the engine wakes into
            if self.relaunches:  # the new engine has its weights when it is there
                self.sync_weights()
                return self
            self.wake_weights()
            self.sync_weights()
            self.actor.offload()
            self.wake_kv_cache()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.config.rollout.sync and kind is None:
            self.sleep()
            device.empty_cache(self.config)

    def wake_weights(self) -> None:
        """Take memory for the weights first: the KV cache need not exist while parameters are gathered."""
        both = self.config.rollout.wake_up == "all"
        self.rollout.wake_up(["weights", "kv_cache"] if both else ["weights"])

    def sync_weights(self) -> SyncStats:
        """Send the actor's parameters to the engine, one bucket after another."""
        if self.relaunches:
            return self._relaunch()
        return self.sender.sync(self.actor.state_dict(), self.step)

    def _relaunch(self) -> SyncStats:
        """Save the actor's parameters, make room, and launch an engine that loads them."""
        start = time.monotonic()
        sent, sent_bytes = self.checkpoint.save(self.actor.state_dict())
        self.actor.offload()
        self.checkpoint.load(sent)
        return SyncStats(sent_bytes, len(sent), 1, time.monotonic() - start)

    def wake_kv_cache(self) -> None:
        """Take memory for the KV cache."""
        if self.config.rollout.wake_up == "staged":
            self.rollout.wake_up(["kv_cache"])

    def sleep(self) -> None:
        """Give the engine's memory back to the device."""
        if self.relaunches:
            self.rollout.end()
        else:
            self.rollout.sleep(self.config.rollout.sleep_level)
