"""Weights that go by a checkpoint on disk, or by broadcast, are in the engine, or the first that is not is named."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import reference_runs as runs
import torch
import torch.distributed as dist
import yaml
from rltrace_reference import checksum, disk_reload, engine_group
from rltrace_reference.config import Config
from rltrace_reference.disk_reload import DiskReload
from rltrace_reference.engine_group import Broadcast
from rltrace_reference.rollout import Rollout
from rltrace_reference.strategy import alternatives
from safetensors.torch import save_file

from rltrace.errors import RunError


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The only rank there is."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_new_engine_holds_what_was_saved(
    rollout: Rollout, weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new engine holds what was saved, and the old one is not missed; a tensor that the disk changed is named."""
    before = rollout.process
    deaths: list[str] = []
    watch = threading.Thread(target=lambda: deaths.append(rollout.death()))
    watch.start()
    with DiskReload(rollout) as reload:
        stats = reload.sync(weights.items())
        folder = Path(reload.folder)
        assert folder.is_dir()
        assert stats.bytes == sum(weight.nbytes for weight in weights.values())
        assert stats.tensors == len(weights)
        assert rollout.checksums() == {name: checksum.of_tensors([weight])[0] for name, weight in weights.items()}
        assert before.poll() == 0
        monkeypatch.setattr(disk_reload, "save_file", save_one_wrong)
        with pytest.raises(RunError, match=r"model\.norm\.weight did not arrive"):
            reload.sync(weights.items())
    assert not folder.exists()
    assert deaths == []
    rollout.process.kill()
    watch.join()
    assert deaths == [f"engine of rank 0 (pid {rollout.process.pid}) died: killed by SIGKILL"]


def save_one_wrong(tensors: dict[str, torch.Tensor], *place: Any, **options: Any) -> None:
    wrong = tensors["model.norm.weight"].clone()
    wrong[3] += 1
    save_file(tensors | {"model.norm.weight": wrong}, *place, **options)


def test_broadcast_reaches_the_engine(
    rollout: Rollout, weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What rank 0 broadcasts is in the engine, and the next broadcast too; a tensor that one changed is named."""
    broadcast = Broadcast(rollout, "gloo")
    for sent in (weights, {name: 2 * weight for name, weight in weights.items()}):
        assert broadcast.sync(sent.items()).tensors == len(weights)
        assert rollout.checksums() == {name: checksum.of_tensors([weight])[0] for name, weight in sent.items()}
    send = engine_group.Group.broadcast

    def send_one_wrong(group: engine_group.Group, tensor: torch.Tensor) -> None:
        send(group, tensor + 1 if tensor.ndim == 1 and len(tensor) == 64 else tensor)

    monkeypatch.setattr(engine_group.Group, "broadcast", send_one_wrong)
    with pytest.raises(RunError, match=r"norm\.weight did not arrive"):
        broadcast.sync(weights.items())


@pytest.mark.run
def test_one_command_compares_every_way(tmp_path: Path) -> None:
    config = runs.write_config(tmp_path, ranks=1)
    command = [sys.executable, "-m", "rltrace_reference.compare_sync", str(config), "--rounds=2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    bucket_megabytes = yaml.safe_load(runs.LAPTOP.read_text())["rollout"]["bucket_megabytes"]
    lines, tensors = done.stdout.splitlines()[1:], len(Config().model.shapes())
    for line, way in zip(lines, alternatives(["shared_memory"], bucket_megabytes), strict=True):
        assert line.strip().startswith(str(way))
        figures = line.strip().removeprefix(str(way)).split()
        if way.least_ranks > 1:
            assert figures == ["unrun:", "needs", "2", "ranks"]
        else:
            assert all(float(milliseconds) > 0 for milliseconds in figures[:3])
            assert figures[-3:] == [str(tensors), "of", str(tensors)], "the checksums"
