"""What NVML says about the GPUs of this host: memory by process, utilisation, power, and bytes over NVLink and PCIe.

NVML numbers processes as the whole machine does. Inside a pid namespace of its own (a container) those numbers may be
nobody's or, worse, somebody else's. So bytes are assigned to a process only if its pid is certain; otherwise the reason
is reported.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rltrace.events import GPU_CLOCK, HEAT_LIMITED, POWER_LIMITED, subject
from rltrace.host import clock, native

MACHINE_PID_NAMESPACE = "pid:[4026531836]"
"""The pid namespace of the machine itself: PROC_PID_INIT_INO in Linux, include/linux/proc_ns.h."""

ALL_LINKS = 0xFFFF_FFFF
"""As `scopeId` of an NVLink field: the sum over all links (nvml.h, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX)."""

DRIVER = Path("/dev/nvidiactl")
"""This exists if a driver is loaded."""

_BY_POWER = 0x04 | 0x80
"""nvml.h, nvmlClocksThrottleReason: SwPowerCap, HwPowerBrakeSlowdown."""
_BY_HEAT = 0x20 | 0x40
"""SwThermalSlowdown, HwThermalSlowdown."""

_DEVICE_FILE = re.compile(r"/dev/nvidia\d+")


class UnavailableError(Exception):
    """NVML cannot tell; the text says why."""


def gpus() -> list[Gpu]:
    """Return the GPUs that NVML shows this process.

    Raises:
        UnavailableError: there is no NVML, no driver, or no GPU.
    """
    try:
        import pynvml
    except ImportError:
        raise UnavailableError("the package nvidia-ml-py is not installed") from None
    try:
        pynvml.nvmlInit()
        found = [Gpu(pynvml, pynvml.nvmlDeviceGetHandleByIndex(at)) for at in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        raise UnavailableError(f"NVML: {error}") from None
    if not found:
        raise UnavailableError("NVML shows no GPU here")
    return found


def driver_version() -> str:
    """Return the version of the GPUs' driver, after `gpus` found some.

    Raises:
        UnavailableError: NVML does not say.
    """
    import pynvml

    try:
        return _text(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError as error:
        raise UnavailableError(f"NVML: {error}") from None


def whole_gpu(uuid: str) -> Gpu:
    """Return the GPU of a process that has the whole GPU.

    Raises:
        UnavailableError: `gpus` raised it, or the process has a MIG slice, which NVML's figures do not describe.
    """
    shown = gpus()
    for gpu in shown:
        if gpu.uuid == uuid and not gpu.is_divided():
            return gpu
    # A part has a uuid of its own, or that of its whole, which depends on the driver.
    if any(gpu.is_divided() for gpu in shown):
        raise UnavailableError(f"{uuid} is a MIG slice, but NVML's totals are of the whole card; use a GPU without MIG")
    raise UnavailableError(f"NVML does not show {uuid} here; it shows {', '.join(gpu.uuid for gpu in shown)}")


class Memory(NamedTuple):
    """How a GPU's memory is divided, in bytes."""

    used_bytes: int
    """Bytes used by processes."""
    reserved_bytes: int
    """Bytes reserved by the driver itself."""
    free_bytes: int


class Gpu:
    """One GPU. What it cannot be asked is in `unavailable`, with the reason."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self.uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        self.unavailable: dict[str, str] = {}
        """The reason by counter."""
        self._memory_at = memory_function(nvml, handle)
        self._rates: dict[str, Rate] = {}
        self._certain: set[int] = set()

    def sample_memory(self) -> Iterator[tuple[str, float]]:
        """Return the counters of its memory with their values now (4 us)."""
        yield from self._ask_once("gpu.used_bytes", self._memory)

    def sample(self, keys: Mapping[int, str]) -> Iterator[tuple[str, float]]:
        """Return the other counters with their values now.

        Args:
            keys: Keys of the run's processes on this host, by pid.
        """
        for what, ask in (
            ("gpu.utilisation_percent", self._utilisation),
            ("gpu.power_watts", self._power),
            (GPU_CLOCK, self._clock),
            (POWER_LIMITED, self._limits),
            ("gpu.process_bytes", lambda: self._processes(keys)),
            ("gpu.nvlink_bytes_per_second", self._nvlink),
            ("gpu.pcie_bytes_per_second", self._pcie),
        ):
            yield from self._ask_once(what, ask)

    def _ask_once(self, what: str, ask: Callable[[], dict[str, float]]) -> list[tuple[str, float]]:
        return [] if what in self.unavailable else self._ask(what, ask)

    def _ask(self, what: str, ask: Callable[[], dict[str, float]]) -> list[tuple[str, float]]:
        """Return the answer to a question; one that this device cannot answer is not asked again."""
        try:
            return [(subject(name, self.uuid, *rest), value) for (name, *rest), value in _split(ask())]
        except UnavailableError as reason:
            self.unavailable[what] = str(reason)
        except self._nvml.NVMLError as error:
            if error.value in (self._nvml.NVML_ERROR_NOT_SUPPORTED, self._nvml.NVML_ERROR_NO_PERMISSION):
                self.unavailable[what] = f"NVML: {error}"
            # else it may answer the next time
        return []

    def is_divided(self) -> bool:
        """Return whether processes get parts of it (MIG)."""
        try:
            current_mode, _ = self._nvml.nvmlDeviceGetMigMode(self._handle)
        except self._nvml.NVMLError:  # it cannot be divided
            return False
        return bool(current_mode == self._nvml.NVML_DEVICE_MIG_ENABLE)

    def name(self) -> str:
        """Return its model.

        Raises:
            UnavailableError: NVML does not say.
        """
        with self._said_as_unavailable():
            return _text(self._nvml.nvmlDeviceGetName(self._handle))

    def memory(self) -> Memory:
        """Return how its memory is divided (4 us).

        Raises:
            UnavailableError: NVML does not say.
        """
        try:  # not `_said_as_unavailable`: this is asked within a program's steps
            return self._divided()
        except self._nvml.NVMLError as error:
            raise UnavailableError(f"NVML: {error}") from None

    def bytes_by_pid(self) -> dict[int, int]:
        """Return what each process holds, of this run and of others (23 us).

        Raises:
            UnavailableError: NVML does not say, or names processes by pids that are not theirs here.
        """
        with self._said_as_unavailable():
            held = self._holders()
        check_pids(held, is_certain=self._is_certain)
        return held

    @contextmanager
    def _said_as_unavailable(self) -> Iterator[None]:
        try:
            yield
        except self._nvml.NVMLError as error:
            raise UnavailableError(f"NVML: {error}") from None

    def _divided(self) -> Memory:
        if self._memory_at is not None:
            state, *sizes = native.LIBRARY.memory_of(*self._memory_at)
            if state:
                raise self._nvml.NVMLError(state)
            return Memory(*sizes)
        # Version 1 counts what the driver reserves for itself (615 MiB on an H200) as used.
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle, version=self._nvml.nvmlMemory_v2)
        return Memory(memory.used, memory.reserved, memory.free)

    def _holders(self) -> dict[int, int]:
        said = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        return {process.pid: process.usedGpuMemory for process in said}

    def _is_certain(self, pid: int) -> bool:
        """Return `pid_is_certain`, asked once per process."""
        if pid not in self._certain and pid_is_certain(pid):
            self._certain.add(pid)
        return pid in self._certain

    def _memory(self) -> dict[str, float]:
        used_bytes, reserved_bytes, free_bytes = self._divided()
        return {"gpu.used_bytes": used_bytes, "gpu.reserved_bytes": reserved_bytes, "gpu.free_bytes": free_bytes}

    def _utilisation(self) -> dict[str, float]:
        rates = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
        return {"gpu.utilisation_percent": rates.gpu, "gpu.memory_utilisation_percent": rates.memory}

    def _power(self) -> dict[str, float]:
        return {"gpu.power_watts": self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3}

    def _clock(self) -> dict[str, float]:
        return {GPU_CLOCK: self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM)}

    def _limits(self) -> dict[str, float]:
        # The older name of the call: drivers before 535 have no other, and newer ones have both.
        reasons = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
        return {POWER_LIMITED: bool(reasons & _BY_POWER), HEAT_LIMITED: bool(reasons & _BY_HEAT)}

    def _processes(self, keys: Mapping[int, str]) -> dict[str, float]:
        return process_bytes(self._holders(), keys, is_certain=pid_is_certain)

    def _nvlink(self) -> dict[str, float]:
        kib = self._fields(
            {
                "gpu.nvlink_sent_bytes_per_second": self._nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
                "gpu.nvlink_received_bytes_per_second": self._nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
            },
            ALL_LINKS,
        )
        return self._per_second({name: 1024 * value for name, value in kib.items()})

    def _pcie(self) -> dict[str, float]:
        # Not nvmlDeviceGetPcieThroughput: it measures for 20 ms a call and says nothing of the rest of the second.
        return self._per_second(
            self._fields(
                {
                    "gpu.pcie_sent_bytes_per_second": self._nvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES,
                    "gpu.pcie_received_bytes_per_second": self._nvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES,
                },
                0,
            )
        )

    def _fields(self, fields: dict[str, int], scope: int) -> dict[str, int]:
        """Yield counters that only grow, by name."""
        answers = self._nvml.nvmlDeviceGetFieldValues(self._handle, [(field, scope) for field in fields.values()])
        for answer in answers:
            if answer.nvmlReturn != self._nvml.NVML_SUCCESS:
                raise self._nvml.NVMLError(answer.nvmlReturn)
        kinds = {
            self._nvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
            self._nvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
            self._nvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
            self._nvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
        }
        return {
            name: getattr(answer.value, kinds.get(answer.valueType, "ullVal"))
            for name, answer in zip(fields, answers, strict=True)
        }

    def _per_second(self, totals: Mapping[str, int]) -> dict[str, float]:
        now_ns = clock.now_ns()
        rates = {name: self._rates.setdefault(name, Rate()).of(total, now_ns) for name, total in totals.items()}
        return {name: rate for name, rate in rates.items() if rate is not None}


def memory_function(nvml: Any, handle: Any) -> tuple[int, int] | None:
    """Return the addresses of the function that says how a GPU's memory is divided, and of the GPU, for `driver.c`.

    Returns:
        None where pynvml has to ask: our library was not built, or the driver is older than 510, or simulated.
    """
    function = getattr(getattr(nvml, "nvmlLib", None), "nvmlDeviceGetMemoryInfo_v2", None)
    if native.LIBRARY is None or function is None:
        return None
    at, gpu = (ctypes.cast(pointer, ctypes.c_void_p).value for pointer in (function, handle))
    return None if at is None or gpu is None else (at, gpu)


class Rate:
    """The rate at which a counter grows."""

    def __init__(self) -> None:
        self._last: tuple[int, int] | None = None

    def of(self, total: int, now_ns: int) -> float | None:
        """Return the rate per second since the last call; None at the first call, and if the counter started anew."""
        last, self._last = self._last, (total, now_ns)
        if last is None or total < last[0] or now_ns <= last[1]:
            return None
        return (total - last[0]) * 1e9 / (now_ns - last[1])


def _text(said: bytes | str) -> str:
    """Return text, as newer bindings give it, whichever are installed."""
    return said.decode() if isinstance(said, bytes) else said


def _split(samples: Mapping[str, float]) -> Iterator[tuple[list[str], float]]:
    """Split what follows a slash from names."""
    return ((name.split("/"), value) for name, value in samples.items())


def process_bytes(
    said: Mapping[int, int | None], keys: Mapping[int, str], *, is_certain: Callable[[int], bool]
) -> dict[str, float]:
    """Return the bytes of a GPU by process of the run, and of all others together.

    Args:
        said: NVML's answer: bytes by pid, None where it does not know.
        keys: Keys of the run's processes, by pid.
        is_certain: Whether one of NVML's pids is that of the process that has it here.

    Raises:
        UnavailableError: NVML does not know the bytes, or its pids are not ours.
    """
    check_pids(said, is_certain=is_certain)
    ours = {f"gpu.process_bytes/{keys[pid]}": float(size or 0) for pid, size in said.items() if pid in keys}
    others = sum(size or 0 for pid, size in said.items() if pid not in keys)
    return {**ours, "gpu.other_processes_bytes": float(others)}


def check_pids(said: Mapping[int, int | None], *, is_certain: Callable[[int], bool]) -> None:
    """Check that the bytes can be assigned to processes; the arguments are those of `process_bytes`.

    Raises:
        UnavailableError: as for `process_bytes`.
    """
    for pid, size in said.items():
        if size is None:
            raise UnavailableError("NVML does not report the memory of single processes on this device")
        if not is_certain(pid):
            raise UnavailableError(f"NVML uses the machine's pids (such as {pid}), and this pid namespace has its own")


def pid_is_certain(pid: int) -> bool:
    """Return whether one of the machine's pids is that of the process which has this pid here.

    It is, in the machine's own pid namespace. In another namespace the driver may translate pids: then every process
    that NVML names exists here and has the file of a GPU open.
    """
    if os.readlink("/proc/self/ns/pid") == MACHINE_PID_NAMESPACE:
        return True
    try:
        files = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return False
    return any(_DEVICE_FILE.fullmatch(file) for file in files)
