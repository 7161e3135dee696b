"""The kernel that carries recorded copies out, in Triton's interpreter: its logic, and not its speed."""

from __future__ import annotations

from support.engines.interpreter import interpreted

INTERPRETED = """
import json, torch
from rolloutmq.sync.tensors.copies import fits
from rolloutmq.sync.tensors.copies_cuda import BLOCK_WORDS, STEP_WORDS, Launch

torch.manual_seed(0)
step, block = 4 * STEP_WORDS, 4 * BLOCK_WORDS
sizes = [0, 4, 12, 16, 4096, step - 4, step, step + 4, block - 4, block, block + 20, 2 * block + 4]
source = torch.randint(0, 256, (sum(sizes) + 64 * len(sizes),), dtype=torch.uint8)
target = torch.zeros_like(source)
wanted, pairs, place = target.clone(), [], 0
for size in sizes:
    pairs.append((target[place:place + size], source[place:place + size]))
    wanted[place:place + size] = source[place:place + size]
    place += size - size % 16 + 32
found = []
for programs, beside_wire in ((1, False), (4, True), (1000, False)):
    target.zero_()
    launch = Launch(pairs)
    launch._programs, launch._beside = (1, programs) if beside_wire else (programs, 1)
    launch.run(beside_wire=beside_wire)
    found.append(torch.equal(target, wanted))
odd = [(target[:8], source[1:9]), (target[4:8], source[:4]), (target[:6], source[:6]), (target[:8:2], source[:4]),
       (target[:16].view(torch.int32), source[:4]), (target[:16].view(torch.bfloat16), source[:16].view(torch.float16))]
print(json.dumps([found, [fits(*pair) for pair in pairs], [fits(*pair) for pair in odd]]))
"""


def test_every_word_is_copied_and_nothing_else() -> None:
    equal, whole, odd = interpreted(INTERPRETED)
    assert equal == [True] * 3
    assert all(whole)
    assert not any(odd)
