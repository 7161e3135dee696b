"""What verl is given: the plug-in's registrations, and methods that take what verl 0.9.1 calls them with."""

from __future__ import annotations

import importlib
import logging
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.trainers import verl_0_9_1 as recorded

from rolloutmq.messages.errors import FeatureUnavailable

ROOM = "rolloutmq.producer.verl"
NEED_VERL = ("plugin", "replica", "adapter", "checkpoint", "steps")
Load = Callable[[str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Imports a module of the room beside the recorded verl."""
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.9.1" if name == "verl" else "0")
    for name, module in recorded.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    forget()
    yield lambda name: importlib.import_module(f"{ROOM}.{name}")
    forget()


def forget() -> None:
    """The next import of a module of the room runs it again."""
    room = importlib.import_module(ROOM)
    for name in NEED_VERL:
        sys.modules.pop(f"{ROOM}.{name}", None)
        vars(room).pop(name, None)


def test_the_entry_point_registers_replica_adapter_and_checkpoint_engine(load: Load) -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["verl.plugins"] == {"rolloutmq": f"{ROOM}.plugin"}
    load("plugin")
    replicas = sys.modules["verl.workers.rollout.replica"].RolloutReplicaRegistry.known
    assert replicas["rolloutmq"]() is load("replica").PoolReplica
    adapters = sys.modules["verl.workers.rollout.base"]._ROLLOUT_REGISTRY
    module, _, name = adapters["rolloutmq", "async"].rpartition(".")
    assert getattr(importlib.import_module(module), name) is load("adapter").PoolServerAdapter
    engines = sys.modules["verl.checkpoint_engine.base"].CheckpointEngineRegistry.known
    assert engines["rolloutmq"] is load("checkpoint").PoolCheckpointEngine


def test_another_version_of_verl_is_refused_aloud(
    load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.8.0")
    with caplog.at_level(logging.WARNING), pytest.raises(ImportError, match=r"needs verl 0\.9, and 0\.8\.0"):
        load("plugin")
    assert "verl has no rollout 'rolloutmq'" in caplog.text


def test_every_method_takes_what_verl_calls_it_with(load: Load) -> None:
    recorded.check_signatures(load("replica").PoolReplica, recorded.RolloutReplica)
    recorded.check_signatures(load("adapter").PoolServerAdapter, recorded.BaseRollout)
    recorded.check_signatures(load("checkpoint").PoolCheckpointEngine, recorded.CheckpointEngine)


@pytest.mark.parametrize("first", ["replica", "adapter", "checkpoint"])
def test_any_module_may_be_the_first_that_a_ray_process_imports(load: Load, first: str) -> None:
    """verl loads the plug-in while it is imported itself: in the middle of the import of one of these."""
    verl_base = sys.modules["verl.workers.rollout.base"]
    replica_base, engine_base = (
        sys.modules[f"verl.{n}"] for n in ("workers.rollout.replica", "checkpoint_engine.base")
    )
    loaded: list[ModuleType] = []

    class Plugged(ModuleType):
        """Loads the plug-in at the first look at a name."""

        def __getattr__(self, name: str) -> Any:
            if not loaded and not name.startswith("__"):
                loaded.append(self)
                load("plugin")
            return getattr(originals[self.__name__], name)

    originals = {module.__name__: module for module in (verl_base, replica_base, engine_base)}
    for name in originals:
        sys.modules[name] = Plugged(name)
    module = load(first)
    assert loaded
    assert load("plugin").NAME in replica_base.RolloutReplicaRegistry.known
    assert module.__name__ == f"{ROOM}.{first}"


def config(**more: Any) -> SimpleNamespace:
    return SimpleNamespace(**({"enable_rollout_routing_replay": False, "engine_kwargs": {}} | more))


async def test_what_a_pool_does_not_do_is_refused_by_name(load: Load) -> None:
    replica, adapter = load("replica").PoolReplica, load("adapter").PoolServerAdapter
    with pytest.raises(FeatureUnavailable, match="is_teacher_model"):
        replica(0, config(), None, is_teacher_model=True)
    with pytest.raises(FeatureUnavailable, match="enable_rollout_routing_replay"):
        replica(0, config(enable_rollout_routing_replay=True), None)
    with pytest.raises(FeatureUnavailable, match="init_colocated"):
        await replica(0, config(), None).init_colocated(None)
    with pytest.raises(FeatureUnavailable, match="wire_format"):
        await adapter(config(), None, None).update_weights([], wire_format="delta_flush")
    with pytest.raises(FeatureUnavailable, match=r"lora\.merge"):
        await adapter(config(), None, None).update_weights([], peft_config={"r": 4})


async def test_ranks_other_than_the_first_only_gather(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    gathered: list[str] = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("a", "b"):
            gathered.append(name)
            yield name, torch.zeros(1)

    await load("adapter").PoolServerAdapter(config(), None, None).update_weights(weights(), global_steps=1)
    engine = load("checkpoint").PoolCheckpointEngine(1 << 20, is_master=False)
    assert engine.build_topology(2, 1, [engine.prepare()]) == ({}, {})
    assert await engine.send_weights(weights(), global_steps=1) == {}
    assert gathered == ["a", "b"] * 2
