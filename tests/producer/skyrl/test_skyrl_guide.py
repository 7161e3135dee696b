"""The loops and the calls of SkyRL's SGLang guide and of its engine's audit, as they are written there."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from support.pools.pool import worker
from support.pools.skyrl import check_output, engine, joined
from support.pools.skyrl_trainer import NAMES, adapter, request, weights

from rolloutmq.messages import InvalidField
from rolloutmq.producer.skyrl import (
    MemoryTag,
    SkyRLEngine,
    create_rl_logit_processor,
    parse_rl_logit_processor,
)
from rolloutmq.producer.skyrl.requests import sampling_fields
from rolloutmq.worker.scripted.engine import ScriptedEngine

PROMPT: Any = {"prompt_token_ids": [[1, 2, 3]], "sampling_params": {"max_generate_length": 4, "logprobs": 0}}


async def test_colocate_all(redis_db: str) -> None:
    """Graphs are in no tag of this loop: they sleep with all memory, and wake with the KV cache."""
    async with worker(redis_db) as running, engine(redis_db) as it:
        await joined(it)
        await it.wake_up(tags=["kv_cache"])  # before anything has slept
        for step in range(1, 4):
            check_output(await it.generate(PROMPT), [3])
            await it.sleep()
            assert running.engine.ops.asleep == set(MemoryTag.ALL)
            await it.wake_up(tags=["weights"])
            await it.update_named_weights(request(step))
            await it.wake_up(tags=["kv_cache"])
            assert not running.engine.ops.asleep
            output = await it.generate(PROMPT)
            assert output["weight_version"] == str(step)


async def test_generate_train_and_update_with_the_weights_asleep(redis_db: str) -> None:
    async with worker(redis_db) as running, engine(redis_db) as it:
        await joined(it)
        assert (await it.generate(PROMPT))["weight_version"] == "0"
        await it.sleep(tags=[MemoryTag.WEIGHTS])
        assert running.engine.ops.asleep == {"weights"}
        await it.update_named_weights(request(1))
        await it.wake_up(tags=[MemoryTag.WEIGHTS])
        output = await it.generate(PROMPT)
        assert output["weight_version"] == "1"
        check_output(output, [3])


async def test_a_session_of_two_turns(redis_db: str) -> None:
    async with worker(redis_db), engine(redis_db) as it:
        session = await it.open_session(capacity=8192)
        assert session is not None
        first = await it.generate_with_session(session, PROMPT)
        rid = (first["request_ids"] or [""])[0]
        second = await it.generate_with_session(session, PROMPT, rid=rid)
        check_output(second, [3 + 4 + 3])
        await it.close_session(session)


async def test_weights_are_validated(redis_db: str) -> None:
    async with worker(redis_db), engine(redis_db) as it:
        await joined(it)
        await it.update_named_weights(request(1))
        await it.update_weight_version("step_100")
        assert (await it.validate_weights())["valid"]
        whole = await it.check_weight_sync_integrity(expected_version="step_100")
        assert whole["consistent"], whole
        assert await it.get_weights_by_name(NAMES[0]) == weights(1)[NAMES[0]].tolist()
        assert (await it.generate(PROMPT))["weight_version"] == "step_100"


async def test_the_calls_for_adapters(redis_db: str, tmp_path: Path) -> None:
    async with worker(redis_db, engine=ScriptedEngine(lora=True)) as running, engine(redis_db) as it:
        await joined(it)
        await it.load_lora_adapter(lora_name="my_adapter", lora_path=adapter(tmp_path), pinned=False)
        assert set(running.engine.loaded) == {("my_adapter", 1)}
        await it.unload_lora_adapter(lora_name="my_adapter")
        assert not running.engine.loaded


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        ("sleep", {"tags": None, "timeout": 60.0, "abort_first": True, "drain_timeout": 5.0}),
        ("wake_up", {"tags": None, "timeout": 60.0}),
    ],
)
def test_the_defaults_of_sleep_and_wake_up(name: str, defaults: dict[str, Any]) -> None:
    parameters = inspect.signature(getattr(SkyRLEngine, name)).parameters
    assert {key: parameters[key].default for key in defaults} == defaults


def test_constraints_travel_as_names_and_never_as_code() -> None:
    text = create_rl_logit_processor(action_mask=[5, 7], disallowed_tokens=[False, False, True])
    assert text is not None
    found = [(one.name, one.params) for one in parse_rl_logit_processor(text)]
    assert found == [("action_mask", {"token_ids": [5, 7]}), ("disallowed_tokens", {"token_ids": [2]})]
    assert create_rl_logit_processor() is None
    fields, _ = sampling_fields({"max_generate_length": 4, "custom_logit_processor": text, "action_mask": [5, 7, 9]})
    assert [one.params["token_ids"] for one in fields["logit_processors"]] == [[5, 7, 9], [5, 7], [2]]
    for wrong in ('{"callable": "80049"}', "[1]", "\x80\x04", '[{"name": "a", "code": "b"}]', "{}", "[]", b"[]"):
        with pytest.raises(InvalidField, match="code never travels"):
            sampling_fields({"custom_logit_processor": wrong})


def test_a_response_ends_where_its_stop_text_begins_unless_the_parameters_say_otherwise() -> None:
    def kept(**params: Any) -> Any:
        fields, _ = sampling_fields(params)
        return fields["sampling"].include_stop

    assert kept(stop=["</a>"]) == kept(stop_regex="a+") == kept(stop=["x"], max_generate_length=3) == "token"
    assert kept(stop=["</a>"], include_stop_str_in_output=True) is True
    assert kept(stop=["</a>"], no_stop_trim=True) is True
    assert kept(stop=["</a>"], no_stop_trim=False) is False
    assert kept(stop_token_ids=[3]) is True


async def test_the_arguments_of_a_sharded_save_reach_the_worker(redis_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with worker(redis_db) as running, engine(redis_db) as it:
        await joined(it)
        asked: list[Any] = []

        async def ask(action: str, params: Any, **_: Any) -> Any:
            asked.append((action, params))
            return {running.id: {}}

        monkeypatch.setattr(it._control, "ask", ask)
        await it.save_sharded_model("/there", pattern="{rank}.{part}.safetensors", max_size=1 << 30)
        await it.save_sharded_model("/there")
        sharded = {"path": "/there", "format": "sharded"}
        more = {"pattern": "{rank}.{part}.safetensors", "max_size": 1 << 30}
        assert asked == [("save", sharded | more), ("save", sharded)]
