"""What README.md shows a reader of the debugger section is what the debugger shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_stepping_through_a_layer() -> None:
    section = (ROOT / "README.md").read_text().split("## Step through a layer")[1].split("\n## ")[0]
    command = re.search(r"python (-m pdb .*)", section)[1]
    typed = re.findall(r"^\(Pdb\) (.*)", section, re.M)
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", section, re.M)
    for cell, _ in rows:
        typed += re.findall(r"`(.*?)`", cell)
    arguments = re.findall(r'"([^"]*)"|(\S+)', command)
    run = subprocess.run([sys.executable, *(quoted or plain for quoted, plain in arguments)], cwd=ROOT, text=True,
                         input="\n".join([*typed, "q", ""]), capture_output=True, timeout=120)
    shown = run.stdout
    assert "Breakpoint 1 at" in shown and "score()" in shown, shown + run.stderr
    told = dict(rows)
    prompt = int(re.search(r"prompt of (\d+) tokens", section)[1])
    position = re.search(r"`(tensor.*?)`", told["`p positions`"])[1]
    assert position == f"tensor([[{prompt}]])" and position in shown
    heads, width = re.search(r"J = (\d+) heads of X = (\d+)", told["`p queries.shape, weights.shape`"]).groups()
    assert f"torch.Size([1, 1, {heads}, {width}])" in shown
    keys = int(re.match(r"\d+", told["`p keys.count`"])[0])
    assert re.search(rf"^\(Pdb\) {keys}$", shown, re.M)
    assert shown.count("--Return--") == 1 and len(re.findall(r"-?\d+\.\d+", shown.split("--Return--")[1].split("(Pdb)")[1])) == keys
