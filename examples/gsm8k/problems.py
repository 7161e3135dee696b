"""Word problems in the form of GSM8K, made here: a question, worked steps, and "#### answer". Nothing is downloaded.

    python examples/gsm8k/problems.py 1000 out/problems.jsonl

A row is as in VERL's data files: `prompt`, `reward_model.ground_truth`, and in `extra_info` the question, the worked
answer, and `tools_kwargs`, which tell the tool of tools.yaml what is right.
"""

import json
import random
import sys

TOOL = "calc_gsm8k_reward"
SYSTEM = f"Solve the problem step by step. Submit the answer with the tool {TOOL}. Then say it as #### <answer>."
NAMES = ("Amina", "Bo", "Carlos", "Dana", "Emre", "Fatou")
THINGS = ("apples", "books", "cards", "eggs", "marbles", "pens")


def bought_and_gave(draw, who, what, most):
    packs, each = draw.randint(2, 5), draw.randint(1, most)
    had = packs * each
    left = draw.randint(1, min(most, had - 1))
    question = f"{who} buys {packs} packs of {each} {what} and gives {had - left} away. How many {what} are left?"
    return question, [f"{packs} * {each} = {had}", f"{had} - {had - left} = {left}"], left


def two_days(draw, who, what, most):
    first = draw.randint(1, (most - 1) // 2)
    more = draw.randint(1, most - 2 * first)
    second = first + more
    question = f"{who} sells {first} {what} on Monday and {more} more than that on Tuesday. How many {what} in all?"
    return question, [f"{first} + {more} = {second}", f"{first} + {second} = {first + second}"], first + second


def shared(draw, who, what, most):
    friends, each = draw.randint(2, 5), draw.randint(1, most)
    question = f"{who} shares {friends * each} {what} equally among {friends} friends. How many does each friend get?"
    return question, [f"{friends * each} / {friends} = {each}"], each


def problems(count, seed=0, most=500):
    """So many rows; the same ones for the same seed. most: no answer is larger; at least 3."""
    draw = random.Random(seed)
    for number in range(count):
        make = draw.choice((bought_and_gave, two_days, shared))
        question, steps, answer = make(draw, draw.choice(NAMES), draw.choice(THINGS), most)
        yield {
            "data_source": "made/gsm8k",
            "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
            "reward_model": {"style": "rule", "ground_truth": str(answer)},
            "extra_info": {
                "index": number,
                "question": question,
                "answer": "\n".join([*steps, f"#### {answer}"]),
                "tools_kwargs": {TOOL: {"create_kwargs": {"ground_truth": str(answer)}}},
            },
        }


if __name__ == "__main__":
    with open(sys.argv[2], "w") as out:
        out.writelines(json.dumps(row) + "\n" for row in problems(int(sys.argv[1])))
