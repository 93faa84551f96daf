"""One of the four processes of tests/test_parallel.py: the split model against the whole one, right and deliberately wrong.

    RANK=r WORLD_SIZE=4 MASTER_ADDR=.. MASTER_PORT=.. python tests/parallel_worker.py DIR FILE

DIR is a checkpoint that splits over four. Ranks form worlds of 4, 2 and 1; the first of each writes to FILE.<its rank>.
"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

import inference  # noqa: E402
from inference import parallel  # noqa: E402
from inference.parallel import Ranks  # noqa: E402
from reference.metrics import relative_l2  # noqa: E402
from reference.parallel_check import compare, prompt_outputs, random_prompts  # noqa: E402

NEW_TOKENS = 4
summed, gathered, own_part = Ranks.summed, Ranks.gathered, parallel._own_part
summed_experts, gathered_scores = parallel._summed_experts, parallel._gathered_scores


def first_half(plan, axis, ranks, name):
    """The cut of `_own_part`, but for one parameter every rank gets what rank 0 should."""
    return own_part(plan, axis, Ranks(0, ranks.size) if plan.name.endswith(name) else ranks)


# Each replaces one attribute by what a careless implementation would do.
WRONG = {
    "no sum of the output projection": (parallel, "_sum_products", lambda linear, ranks: None),
    "no sum at all": (Ranks, "summed", lambda self, x: x),
    "experts of the next rank": (parallel, "_summed_experts", lambda routed, experts, ranks: summed_experts(
        routed, experts, Ranks((ranks.rank + 1) % ranks.size, ranks.size, ranks.group))),
    "logits gathered in the wrong order": (Ranks, "gathered", lambda self, x: torch.cat(
        gathered(self, x).chunk(self.size, -1)[::-1], -1)),
    "sinks of the first heads": (parallel, "_own_part", lambda *given: first_half(*given, "attn.attn_sink")),
    "output groups of the first rank": (parallel, "_own_part", lambda *given: first_half(*given, "attn.wo_a.weight")),
    "visibility counted from the first own key": (parallel, "_gathered_scores", lambda score, ratio, ranks: gathered_scores(
        score, 0, ranks)),
}


@contextmanager
def replaced(owner: object, name: str, value: object):
    right = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, right)


def main(checkpoint: str, out: str) -> None:
    torch.set_num_threads(1)
    four = parallel.join()
    groups = {pair: dist.new_group(pair) for pair in ((0, 1), (2, 3), (0,), (1,), (2,), (3,))}
    me = four.rank
    pair = (me // 2 * 2, me // 2 * 2 + 1)
    two, one = Ranks(me % 2, 2, groups[pair]), Ranks(0, 1, groups[(me,)])
    lines = []

    def add(world: Ranks, numerics: str, fake_quant: bool, weights: str) -> None:
        line = compare(Path(checkpoint), world, "cpu", numerics, fake_quant, weights, new_tokens=NEW_TOKENS)
        if line is not None:
            lines.append({"world": world.size, **line})

    add(four, "float32", False, "resident")
    add(four, "native", True, "packed")
    add(two, *(("float32", False, "packed"), ("native", True, "stream"))[me // 2])
    if two.rank == 0:
        add(one, *(("native", True, "resident"), ("float32", False, "stream"))[me // 2])

    with torch.no_grad():
        whole = inference.load(checkpoint, numerics="float32", fake_quant=False)
        prompts = random_prompts(whole, 0)
        wanted = prompt_outputs(whole, prompts)
        for name in sorted(WRONG)[me // 2::2]:
            with replaced(*WRONG[name]):
                model = inference.load(checkpoint, numerics="float32", fake_quant=False, ranks=two)
                found = prompt_outputs(model, prompts)
            if two.rank == 0:
                lines.append({"wrong": name, "distance": relative_l2(found["logits"], wanted["logits"])})
    Path(f"{out}.{me}").write_text("\n".join(map(json.dumps, lines)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
