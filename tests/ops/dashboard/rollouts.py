"""Rollouts as the dashboard's page gets them: the list, one token by token, and the report of a replay."""

from __future__ import annotations

import random

from states import HOSTILE, NOW, Json


def rows(number: int = 160) -> list[Json]:
    """The list of rollouts, newest first."""
    rng = random.Random(5)
    fates = [
        ("done", "trained", ""),
        ("done", "trained", ""),
        ("done", "dropped", "older than 4 versions"),
        ("running", None, ""),
        ("dead", None, "KeyError: 'tool'"),
    ]
    made = []
    for at in range(number):
        state, fate, why = fates[rng.randrange(5)]
        version = 48 - at // 40
        made.append(
            {
                "job_id": f"0199f3c2-{at:04x}-7c31-9d02-5a8e{at:08x}",
                "sample": at % 4,
                "at": NOW - 3 * at,
                "client": "trainer-0",
                "worker": f"gpu-0{at % 2}-{at % 8}",
                "state": state,
                "tokens": rng.randrange(40, 4000),
                "oldest_version": version - at % 2,
                "newest_version": version,
                "reward": None if state != "done" else round(rng.uniform(-1, 1), 3),
                "fate": fate,
                "why": why,
                "session": f"s{at // 4}",
                "finish_reason": "stop",
            }
        )
    return made


def rollout(job_id: str, sample: int = 0, tokens: int = 420) -> Json:
    """One sample: two versions, two legs, masked tools' output, and a replay that differs at token 180."""
    rng = random.Random(7)
    words = [
        " the",
        " of",
        " policy",
        " reward",
        ",",
        " is",
        " then",
        " we",
        " \n",
        " compute",
        " 17",
        ".",
        " answer",
        " x",
        " =",
        " token",
        "s",
        " step",
    ]
    made = []
    for at in range(tokens):
        text = HOSTILE[at % 5] if job_id == "hostile" else rng.choice(words)
        made.append(
            {
                "id": rng.randrange(150_000),
                "text": None if at == 11 else text,
                "version": 47 + (at >= 150),
                "leg": int(at >= 150),
                "logprob": None if at == 12 else -rng.expovariate(1.2),
                "mask": int(not 90 <= at < 130),
                "mismatch": 0.0 if at < 180 else round(rng.uniform(-0.4, 0.4), 4),
            }
        )
    turns = [
        {
            "job_id": f"{job_id}-t{at}" if at != 3 else job_id,
            "sample": sample,
            "turn": at,
            "parent": None if not at else at - 1 if at < 4 else 2,
            "tokens": 90 * at + 33,
            "reward": 0.5 if at == 5 else None,
            "version": 46 + at // 3,
        }
        for at in range(6)
    ]
    return {
        "job_id": job_id,
        "sample": sample,
        "samples": 4,
        "prompt": {"ids": [1, 2, 3], "text": ["You are", " a careful", " solver."]},
        "tokens": made,
        "legs": [0, 150],
        "in_place": [150],
        "cached_tokens": 128,
        "facts": {"worker": "gpu-00-3", "finish reason": "stop", "temperature": "1.0"},
        "notes": [{"at": NOW - 20, "fate": "trained", "reward": 0.5}],
        "events": [{"at": NOW - 90, "text": "submitted"}, {"at": NOW - 30, "text": "done"}],
        "turns": turns,
        "verdict": {"state": "differs", "text": "another token from 180 on", "at": min(180, tokens - 1)},
    }


def replay() -> Json:
    """A report of `rolloutmq replay`, as the export has it."""
    tally = {
        "samples": 40,
        "same": 31,
        "differs": 7,
        "unverified": 2,
        "first_differences": 7,
        "tokens": 18_400,
        "other_tokens": 212,
        "compared_logprobs": 18_188,
        "mean_gap": -0.0003,
        "mean_size": 0.0021,
        "largest_gap": 1.42,
    }
    detail = {
        "start": 0,
        "first": 12,
        "left_out": 0,
        "ids": [5, 9, 5, 7] * 10,
        "replayed": {"12": 8, "30": 9},
        "logprobs": [-0.2] * 40,
        "gaps": [0.0] * 12 + [0.3] * 28,
        "entropy": None,
        "spans": [[47, 0, 20], [48, 20, 40]],
        "legs": [0, 20],
        "in_place": [],
        "of_each_token": {"mask": [1] * 40},
        "prompt": [5, 7],
        "prompt_left_out": 0,
    }
    listed = [
        {
            "name": f"0199f3c2-{at:04x}.0",
            "job": f"0199f3c2-{at:04x}",
            "sample": 0,
            "state": "differs" if at < 7 else "same",
            "first": 12 if at < 7 else None,
            "version": 48 if at < 7 else None,
            "worker": f"gpu-00-{at % 8}",
            "attempt": 1,
            "group": "g",
            "client": "trainer-0",
            "at": NOW - at,
            "tokens": 40,
            "other_tokens": 2 if at < 7 else 0,
            "versions": [47, 48],
            "largest_gap": 0.3,
            "finish": "stop",
            "replayed_finish": "stop",
            "reasons": ["another token"] if at < 7 else [],
            "notes": {"reward": 0.5},
            "metadata": {},
            "look": "rolloutmq job 0199f3c2",
            **({"detail": detail} if at < 3 else {}),
        }
        for at in range(12)
    ]
    return {
        "about": {"command": "rolloutmq replay run/", "weights": "snapshots/48"},
        "journal": "run/",
        "samples": 40,
        "states": {"same": 31, "differs": 7, "unverified": 2},
        "limits": {"logprob": 0.05},
        "engines": {
            "recorded": [{"samples": 40, "fingerprint": {"sglang": "0.5.22", "torch": "2.13.0"}}],
            "replayed": [{"samples": 40, "fingerprint": {"sglang": "0.5.23", "torch": "2.13.0"}}],
        },
        "unread": 0,
        "reasons": [{"reason": "another token", "samples": 7}],
        "total": tally,
        "versions": [{"version": version} | tally for version in (47, 48)],
        "workers": [{"worker": f"gpu-00-{at}"} | tally for at in range(3)],
        "histogram": {
            "edges": [10.0 ** (at / 2 - 8) for at in range(19)],
            "tokens": [max(0, 900 - 45 * at) for at in range(20)],
            "exactly_equal": 9000,
            "unknown": 2,
        },
        "positions": [
            {"start": 20 * at, "end": 20 * at + 20, "tokens": 300, "mean": 0.001 * at, "largest": 0.01 * (at + 1)}
            for at in range(8)
        ],
        "listed": listed,
        "left_out": {"of_the_list": 28, "token_by_token": 37},
        "texts": {"5": " the", "7": " a", "8": " an", "9": "\n"},
    }
