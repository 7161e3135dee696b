"""An agent on OpenAI's client: it finds out whether a sum is even. It knows nothing of training or of tokens.

The model of this example is tiny and random, so it says one character at a time. An even one means yes.
"""

import sys

from openai import OpenAI


def says_yes(client, talk):
    """What the model says next, which becomes a part of the talk."""
    answer = client.chat.completions.create(model="tiny", messages=talk, max_tokens=1)
    said = answer.choices[0].message.content or "?"
    talk.append({"role": "assistant", "content": said})
    return ord(said) % 2 == 0


def is_even(client, a, b):
    """The model may have the sum computed, and then has to say what that gave. None if it did not ask."""
    talk = [{"role": "user", "content": f"{a}+{b}"}]
    if not says_yes(client, talk):
        return None
    talk.append({"role": "user", "content": ("no ", "yes ")[(a + b) % 2 == 0] * 8})  # loud: the model is very small
    return says_yes(client, talk)


if __name__ == "__main__":
    with OpenAI(base_url=sys.argv[1], api_key="none") as openai:
        print(is_even(openai, int(sys.argv[2]), int(sys.argv[3])))
