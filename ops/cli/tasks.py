"""`rolloutmq embed` and `score`: figures for existing texts; `decode`: ids to text, without a pool."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ...messages.errors import ConfigError, InvalidField
from ...messages.model import RewardResult
from ...messages.redis import DEFAULT_URL
from ..files import check_out, json_lines, lines, writing
from ..redis import reach
from .options import Json, Pool, RedisUrl, ids, say, seconds

Inputs = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help='JSONL: a string, {"text": …}, {"token_ids": […]} or {"messages": […]}, all of one form.',
        exists=True,
    ),
]
Timeout = Annotated[float | None, seconds("Seconds to wait for all of it; default: as long as it takes.")]


def embed(
    file: Inputs,
    out: Annotated[Path, typer.Option(help="NumPy file (.npy) for the (n, d) float32 array.")],
    dimensions: Annotated[int | None, typer.Option(help="Keep so many components (Matryoshka).")] = None,
    normalize: Annotated[bool, typer.Option(help="To length 1.")] = True,
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    timeout: Timeout = None,
    json: Json = False,
) -> None:
    """Embed every line of a file, on workers with --task embed.

    \b
    rolloutmq embed texts.jsonl --out vectors.npy
    """
    import numpy as np

    from ...producer.blocking import BlockingRolloutClient

    check_out("--out", out)
    if out.suffix != ".npy" or not out.parent.is_dir():
        raise InvalidField("--out", str(out), "a name that ends with .npy, in a folder that there is")
    inputs = list(_lines(file).values())
    reach(redis, pool)
    with BlockingRolloutClient(redis, pool) as client:
        vectors = client.embed(inputs, dimensions=dimensions, normalize=normalize, timeout=timeout)
    with writing("--out", out):
        np.save(out, vectors)
    (count, size) = vectors.shape
    state = {"out": str(out), "embeddings": count, "components": size}
    say(state, [f"{out}: {count} embeddings of {size} components"], json)


def score(
    continuations: Annotated[
        list[str] | None, typer.Argument(metavar="CONTINUATIONS", help="Texts that may come next, one or several.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="The text before them.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="Instead: JSONL as for `embed`, for workers with --task reward.", exists=True)
    ] = None,
    as_ids: Annotated[bool, typer.Option("--ids", help="Prompt and continuations are ids, such as '5 17 3'.")] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="Print the log-probability of each token too.")] = False,
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    timeout: Timeout = None,
    json: Json = False,
) -> None:
    """Score continuations of a prompt, or the lines of a file.

    A continuation's score is how likely it is, a line's what a reward model gives it. There is one JSON line for
    each, in their order.

    \b
    rolloutmq score --prompt "The capital of France is" " Paris." " Rome."
    rolloutmq score --file answers.jsonl
    """
    from ...producer.blocking import BlockingRolloutClient

    if bool(continuations and prompt is not None) == (file is not None) or (file is not None and (as_ids or tokens)):
        raise ConfigError("give --prompt and CONTINUATIONS, or --file alone")
    if file is not None:
        inputs = _lines(file)
        reach(redis, pool)
        with BlockingRolloutClient(redis, pool) as client:
            rewards = client.reward(list(inputs.values()), timeout=timeout)
        _say_all([_rewarded(line, reward) for line, reward in zip(inputs, rewards, strict=True)], json)
        return
    given: Any = ids("--prompt", prompt or "") if as_ids else prompt
    parts: list[Any] = [ids("CONTINUATIONS", part) if as_ids else part for part in continuations or []]
    reach(redis, pool)
    with BlockingRolloutClient(redis, pool) as client:
        results = client.score(given, parts, timeout=timeout)
    found = []
    for text, result in zip(continuations or [], results, strict=True):
        line = {"continuation": text, "logprob": result.sum, "per_token": result.mean, "tokens": result.logprobs.size}
        more = {"logprobs": [float(value) for value in result.logprobs]} if tokens else {}
        found.append(line | more | {"version": result.version})
    _say_all(found, json)


def _rewarded(line: int, result: RewardResult) -> dict[str, Any]:
    scores = [float(value) for value in result.scores]
    return {"line": line, "score": scores[0], "scores": scores, "version": result.version}


def decode(
    model: Annotated[str, typer.Option(help="Folder or hub name of the model, or a tokenizer.json.")],
    token_ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="Token ids.")] = None,
    file: Annotated[Path | None, typer.Option(help="JSONL with token_ids, as `submit` writes.", exists=True)] = None,
    special: Annotated[bool, typer.Option("--special", help="Keep special tokens.")] = False,
    json: Json = False,
) -> None:
    """Print the text of token ids. Of a file, it prints a JSON string per line. No pool is needed.

    \b
    rolloutmq decode --model Qwen/Qwen3-8B 785 6722
    rolloutmq decode --model Qwen/Qwen3-8B --file answers.jsonl
    """
    from ...producer.data import Decoder

    if bool(token_ids) == (file is not None):
        raise ConfigError("give token ids, or --file")
    given = [ids("ID", " ".join(token_ids or ()))] if file is None else _answers(file, kept=json)
    decoder = Decoder(model)
    texts = (decoder.decode(one, special=special) for one in given)
    if file is None and not json:
        typer.echo(next(texts))
    else:
        _say_all(texts, json and file is not None)


def _answers(file: Path, *, kept: bool) -> Iterator[list[int]]:
    """The token ids of each line. kept: the caller keeps all of them."""
    for number, line in json_lines(lines("--file", file, kept=kept)):
        given = line.get("token_ids") if isinstance(line, dict) else None
        if not isinstance(given, list):
            raise InvalidField(f"line {number}", line, "an object with token_ids")
        # An answer may have no tokens: a sample that was stopped before it began.
        yield ids(f"line {number}.token_ids", " ".join(map(str, given))) if given else []


def _say_all(found: Iterable[Any], json: bool) -> None:
    """One line of JSON for each as it comes, or all of them as one list."""
    for line in [list(found)] if json else found:
        typer.echo(jsonlib.dumps(line, ensure_ascii=False))


def _lines(file: Path) -> dict[int, Any]:
    """The inputs by line number; empty lines count and are left out."""
    inputs = {number: _input(number, given) for number, given in json_lines(lines("FILE", file))}
    if not inputs:
        raise InvalidField("FILE", str(file), "must have a line that is not empty")
    return inputs


def _input(number: int, given: Any) -> Any:
    if isinstance(given, dict) and len(found := [given[name] for name in _FORMS if name in given]) == 1:
        given = found[0]
    if not isinstance(given, str | list) or not given:
        raise InvalidField(f"line {number}", given, "a string, or an object with text, token_ids or messages")
    return given


_FORMS = ("text", "token_ids", "messages")
