"""Reads the clocks of a job's hosts against each other, through the store that the job has anyway.

One process of each host takes part, in a thread of its own and over a connection of its own to the job's TCPStore, so
that the program waits for nothing. Rank 0 asks, each other host answers with its time. Between two rounds all of them
sleep. The readings are in the Recording of rank 0's host.

Rank 0 leaves its group without waiting for another host: with `env://`, a rank that has left already may begin the next
group, and would join the store that rank 0 is about to close.

Source read: torch 2.6 to 2.15, torch/csrc/distributed/c10d/TCPStore.cpp.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from rltrace.host import clock
from rltrace.host.interruption import own_failure
from rltrace.record import clock_readings
from rltrace.record.clock_readings import Exchange
from rltrace.record.manifest import host_name

EXCHANGES = 20
"""Exchanges in one round; only the shortest is kept."""
FIRST_SECONDS = 0.25
"""Time before the first round, which doubles with each round: a short run has several readings too."""
PERIOD_SECONDS = 5.0
"""Longest time between two rounds, on few hosts."""
REST = 100
"""A round is followed by a pause that is at least so many times as long as its exchanges need, which is not what they
take beside other work: with many hosts, readings become rarer."""
ANSWER_SECONDS = 5.0
"""How long another host may take to answer, which may be busy. One that takes longer is asked again when it has
answered."""
LAST_ANSWER_SECONDS = 0.02
"""How long rank 0's program may wait for another host when it ends, whose last answer takes some 100 microseconds."""
END_SECONDS = 1.0
"""How long the program may wait for its own thread when it ends, which needs some microseconds of a processor."""
_EVER = timedelta(days=365)

ASK, LEAVE, GONE = "ask", "leave", b"gone"
"""What a question says, and what one answers who has left."""


class Place(str):
    """The prefix of one host's keys in the store."""

    def question(self, turn: int) -> str:
        """Where rank 0 asks, by turns at two places: the other one is being cleared meanwhile."""
        return f"{self}/question{turn}"

    def answer(self, turn: int) -> str:
        """Where the host answers."""
        return f"{self}/answer{turn}"

    @property
    def who(self) -> str:
        """Where the host says who it is."""
        return f"{self}/who"


class Reader:
    """Part of a process in the reading of clocks: a thread that asks, or one that answers."""

    def __init__(self, connect: Callable[[], Any], session: str, recording: Path | None) -> None:
        """Begin.

        Args:
            connect: Makes a connection to the job's store.
            session: What tells this process group from earlier ones, whose keys are left in the store.
            recording: Where readings are appended, in rank 0's process; None in all others.
        """
        self._pid = os.getpid()
        self._connect = connect
        self._prefix = f"rltrace/{session}"
        self._recording = recording
        self._is_over = threading.Event()
        self._waker: Any = None
        self._place: Place | None = None
        """Where the thread waits, or has waited last."""
        self._thread = threading.Thread(target=self._run, name="rltrace clocks", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the thread. In a child that was forked there is none, and the connection is its parent's."""
        if self._pid != os.getpid() or not self._thread.is_alive():
            return
        self._is_over.set()
        if self._recording is not None:
            self._thread.join(LAST_ANSWER_SECONDS)
        if self._thread.is_alive() and self._waker is not None and self._place is not None:
            _part(self._waker, self._place)
        self._thread.join(END_SECONDS)

    def _run(self) -> None:
        try:
            self._waker = self._connect()
            if self._recording is not None:
                self._ask(self._connect(), self._recording)
            else:
                self._answer(self._connect())
        except own_failure():  # the store is gone with its process: the job is over, or has crashed
            pass

    # ---- a host's part ------------------------------------------------------------------------------------------

    def _answer(self, store: Any) -> None:
        """Answer every question until told to leave."""
        boot_id, time_namespace = clock.own_domain()
        if store.add(f"{self._prefix}/{boot_id}/{time_namespace}", 1) > 1:
            return  # another process of this host does it
        place = Place(f"{self._prefix}/{store.add(f'{self._prefix}/hosts', 1)}")
        store.set(place.who, json.dumps([host_name(), boot_id, time_namespace]))
        store.set_timeout(_EVER)
        self._place = place
        turn = 0
        while not self._is_over.is_set():
            word = store.get(place.question(turn))
            now_ns = clock.now_ns()
            if word != ASK.encode():
                return
            store.set(place.answer(turn), str(now_ns))
            store.delete_key(place.question(turn))
            turn = 1 - turn

    # ---- rank 0's part ------------------------------------------------------------------------------------------

    def _ask(self, store: Any, recording: Path) -> None:
        """Read the clock of every host, round by round."""
        store.set_timeout(timedelta(seconds=ANSWER_SECONDS))
        hosts: dict[int, _Host] = {}
        needed_ns = 0
        for seconds in _pauses():
            if self._is_over.wait(max(seconds, REST * needed_ns / 1e9)):
                break
            needed_ns = 0
            for number in range(1, store.add(f"{self._prefix}/hosts", 0) + 1):
                place = Place(f"{self._prefix}/{number}")
                if number not in hosts and store.check([place.who]):
                    hosts[number] = _Host(store, place, self._is_over.is_set)
            for host in hosts.values():
                self._place = host.place
                if not host.is_gone and (shortest := host.shortest()) is not None:
                    clock_readings.append(recording, host.line(shortest))
                    needed_ns += EXCHANGES * (shortest[2] - shortest[0])
        for host in hosts.values():
            _part(store, host.place)
        store.check([f"{self._prefix}/hosts"])  # answered behind the others: nobody still waits when the store goes


class _Host:
    """A host whose clock rank 0 reads."""

    def __init__(self, store: Any, place: Place, is_over: Callable[[], bool]) -> None:
        self._store = store
        self.place = place
        self._is_over = is_over
        self._turn = 0
        self._is_late = False
        """Whether it has not answered the last question, or had not when it was last looked for."""
        name, boot_id, time_namespace = json.loads(store.get(place.who))
        self._name = str(name)
        self._domain = (str(boot_id), str(time_namespace))
        self.is_gone = self._domain == clock.own_domain()
        """Whether it is not asked any more, or need not be, because its clock is ours."""

    def shortest(self) -> Exchange | None:
        """Return the shortest exchange of a round; None if an answer is missing."""
        exchanges = []
        for _ in range(EXCHANGES):
            exchange = None if self._is_over() else self._exchange()
            if exchange is None:
                return None
            exchanges.append(exchange)
        return clock_readings.shortest(exchanges)

    def line(self, exchange: Exchange) -> str:
        """Return the line about such an exchange."""
        return clock_readings.line(clock.own_domain(), self._domain, exchange, host=self._name, exchanges=EXCHANGES)

    def _exchange(self) -> Exchange | None:
        if self._is_late and not self._has_caught_up():
            return None
        sent_ns = clock.now_ns()
        self._store.set(self.place.question(self._turn), ASK)
        try:
            answer = self._awaited()
        except own_failure(RuntimeError):  # it was killed, or stands still
            self._is_late = True
            return None
        return None if answer is None else (sent_ns, *answer)

    def _has_caught_up(self) -> bool:
        """Return whether it has answered at last, and take that answer away."""
        self._is_late = not self._store.check([self.place.answer(self._turn)])
        return not self._is_late and self._awaited() is not None

    def _awaited(self) -> tuple[int, int] | None:
        """Return the answer that is awaited, and when it was here; None if the host has left."""
        read = self._store.get(self.place.answer(self._turn))
        received_ns = clock.now_ns()
        if read == GONE:
            self.is_gone = True
            return None
        self._store.delete_key(self.place.answer(self._turn))
        self._turn = 1 - self._turn
        return int(read), received_ns


def _part(store: Any, place: Place) -> None:
    """Let a host and rank 0 leave, at whichever turn they wait for each other."""
    for turn in (0, 1):
        store.set(place.question(turn), LEAVE)
        store.set(place.answer(turn), GONE)


def _pauses() -> Iterator[float]:
    seconds = FIRST_SECONDS
    while True:
        yield seconds
        seconds = min(2 * seconds, PERIOD_SECONDS)
